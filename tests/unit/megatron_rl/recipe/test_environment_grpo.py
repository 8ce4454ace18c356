"""The algorithm of each environment: its own keys in place of those of `grpo`, checked together with these."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from core_helpers import tiny_run
from pydantic import ValidationError

from megatron_rl.recipe.config import RunConfig

BASE = {"prompts_per_step": 4, "group_size": 4, "kl_beta": 0.1, "importance": {"upper": 3.0}}


def recipe(*own: dict[str, Any] | None, grpo: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """Recipe with the environments e0, e1, ...; own: keys of `grpo` of each."""
    listed = [{"name": "arithmetic", "id": f"e{at}", "grpo": its} for at, its in enumerate(own)]
    base = tiny_run(grpo=BASE | (grpo or {})).model_dump() | {"environment": None, "environments": listed}
    return base | sections


def configured(*own: dict[str, Any] | None, grpo: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(recipe(*own, grpo=grpo, **sections))


def test_a_key_that_is_left_out_is_that_of_grpo() -> None:
    config = configured({"advantage_std": "none", "eps_high": 0.28}, None)
    assert config.algorithms.by("e0") == config.grpo.model_copy(update={"advantage_std": "none", "eps_high": 0.28})
    assert config.algorithms.by("e1") == config.grpo
    assert config.algorithms.each == (config.grpo, config.algorithms.by("e0"))


def test_null_is_a_value_where_grpo_takes_null() -> None:
    assert configured({"importance": None}, None).algorithms.by("e0").importance is None
    with pytest.raises(ValidationError, match=r"kl_beta is null, which is not a value of grpo.kl_beta: leave it out"):
        configured({"kl_beta": None}, None)


def test_the_resolved_recipe_reads_back_as_the_same_algorithms() -> None:
    own: dict[str, Any] = {"importance": None, "turn_discount": 0.9, "dynamic_sampling": {"enabled": True}}
    config = configured(own, {}, None, grpo={"dynamic_sampling": {"max_rounds": 3}})
    again = RunConfig.model_validate(yaml.safe_load(yaml.safe_dump(config.model_dump())))
    assert again == config and again.algorithms == config.algorithms
    assert again.algorithms.by("e0").dynamic_sampling.max_rounds == 3


def test_grpo_itself_is_no_algorithm_if_every_environment_has_its_own() -> None:
    config = configured({"kl_beta": 0.0}, {"kl_beta": 0.0, "advantage_std": "none"})
    assert [each.advantage_std for each in config.algorithms.each] == ["population", "none"]
    assert not config.algorithms.penalise_kl
    assert configured({"kl_beta": 0.0}, None).algorithms.penalise_kl


def test_environments_that_only_evaluate_have_no_algorithm() -> None:
    listed = recipe({"kl_beta": 0.0}, None)
    listed["environments"][1]["evaluation_only"] = True
    config = RunConfig.model_validate(listed)
    assert config.algorithms.each == (config.algorithms.by("e0"),)


@pytest.mark.parametrize(
    ("own", "grpo", "sections", "message"),
    [
        (
            {"eps_low": 0.3},
            {"policy_loss": "reinforce"},
            {},
            r"environments.0.grpo: eps_low 0.3 is not read by",
        ),
        (
            {"baseline": "pass_at_k"},
            {},
            {},
            r"environments.0.grpo: baseline pass_at_k needs pass_k",
        ),
        (
            {"baseline": "batch"},
            {"turn_discount": 0.9},
            {},
            r"environments.0.grpo: turn_discount compares turns",
        ),
        (
            {"turn_discount": 0.9},
            {"policy_loss": "gspo"},
            {},
            r"environments.0.grpo: turn_discount gives the turns",
        ),
        ({"turn_weight": 0.5}, {}, {}, r"environments.0.grpo: turn_weight is set, and turn_discount is not"),
        ({"baseline": "per_reward"}, {}, {}, r"grpo.baseline per_reward needs reward_weights of environment"),
        ({"baseline": "mine:advantages"}, {}, {}, r"is a function of yours, which only grpo.baseline can name"),
        ({"group_size": 8}, {}, {}, r"group_size\n  Extra inputs are not permitted"),
        (
            {"overlong": {"mode": "penalty", "buffer": 99}},
            {},
            {},
            r"overlong.buffer 99 is larger than sampling",
        ),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_contradictions_are_found_for_each_environment(
    own: dict[str, Any], grpo: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        configured(own, None, grpo=grpo, **sections)


def test_supervised_training_has_no_algorithm() -> None:
    listed = recipe({"advantage_std": "none"}, None)
    listed["training"]["objective"] = "supervised"
    listed["grpo"] = None
    with pytest.raises(ValidationError, match=r"environments.0.grpo is set, and training.objective supervised"):
        RunConfig.model_validate(listed)


def test_keys_for_an_environment_that_is_never_trained_on_are_refused() -> None:
    listed = recipe({"advantage_std": "none"}, None)
    listed["environments"][0]["weight"] = 0.0
    with pytest.raises(ValidationError, match=r"environment 'e0' has keys of grpo, and nothing is trained on it"):
        RunConfig.model_validate(listed)


@pytest.mark.parametrize("key", ["turn_weight", "episode_weight"])
def test_weights_of_turns_need_a_discount(key: str) -> None:
    with pytest.raises(ValidationError, match=rf"{key} is set, and turn_discount is not"):
        tiny_run(grpo={key: 0.5})
    with pytest.raises(ValidationError, match=r"turn_weight and episode_weight are both 0"):
        tiny_run(grpo={"turn_discount": 1.0, "turn_weight": 0.0, "episode_weight": 0.0})
