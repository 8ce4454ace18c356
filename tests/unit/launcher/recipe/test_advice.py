"""Settings that rarely teach what their author means are named before a run starts, and no others."""

from __future__ import annotations

import re
from typing import Any

import pytest
from core_helpers import tiny_run

from launcher.recipe.advice import warnings
from launcher.recipe.load import load_recipe
from launcher.recipe.shipped import shipped_recipes
from megatron_rl.recipe.config import RunConfig

PENALTY = {"mode": "penalty", "buffer": 2}


def warned(grpo: dict[str, Any], environment: dict[str, Any] | None = None) -> list[str]:
    sections = {"environment": environment} if environment else {}
    config = tiny_run(grpo=grpo, sampling={"max_new_tokens": 10}, **sections)
    return list(warnings(config))


def maths(name: str = "math", **args: Any) -> dict[str, Any]:
    return {"name": name, "args": {"train": {"path": "problems.jsonl"}} | args}


@pytest.mark.parametrize(
    ("grpo", "environment", "text"),
    [
        ({"overlong": PENALTY | {"penalty": 1.0}}, None, "overlong.penalty is 1.*only 1 more.*Set penalty to 0.5"),
        ({"overlong": PENALTY | {"penalty": 0.5}}, maths(format_reward=0.5), "penalty is 0.5.*only 0.5 more.*to 0.25"),
        ({"overlong": PENALTY | {"penalty": 1.0}}, maths("dapo-math-17k"), "overlong.penalty is 1.*only 1 more"),
        (
            {"overlong": PENALTY | {"penalty": 1.0}},
            {"name": "calculator", "args": {}},
            "overlong.penalty is 1.*only 1 more",
        ),
        ({"overlong": PENALTY | {"buffer": 4}}, None, "4 of the 10 tokens.*from 6 tokens on. Set buffer to 2, a fifth"),
        ({"length_penalty": 2.0}, None, "length_penalty is 2.*Set length_penalty below 2"),
        ({"kl_estimator": "k2"}, None, "kl_estimator is k2, and grpo.kl_beta is 0.*leave kl_estimator out"),
        ({"kl_in": "reward"}, None, "kl_in is reward, and grpo.kl_beta is 0"),
        ({"dynamic_sampling": {"max_rounds": 4}}, None, "max_rounds is 4, and enabled is false.*set enabled to true"),
        ({"kl_beta": 0.1, "kl_estimator": "k1"}, None, "kl_estimator is k1 and grpo.kl_in is loss.*k2 or k3"),
        (
            {"policy_loss": "reinforce", "iterations": 2},
            None,
            "iterations is 2.*policy_loss to clip",
        ),
    ],
)
def test_a_setting_that_teaches_something_else_is_named_with_what_to_do(
    grpo: dict[str, Any], environment: dict[str, Any] | None, text: str
) -> None:
    (warning,) = warned(grpo, environment)
    assert re.search(text, warning), warning


@pytest.mark.parametrize(
    ("grpo", "environment"),
    [
        ({"overlong": PENALTY}, None),
        ({"overlong": PENALTY | {"penalty": 1.0}}, maths(format_reward=-1.0, negative_reward=-1.0)),
        (
            {"overlong": PENALTY | {"penalty": 1.0}},
            {"name": "python", "args": {"file": "reward.py", "train": "a.jsonl"}},
        ),
        ({"overlong": {"mode": "mask"}, "length_penalty": 0.5}, None),
        ({"kl_beta": 0.1, "kl_estimator": "k1", "kl_in": "reward"}, None),
        ({"kl_beta": 0.1, "kl_estimator": "k1", "kl_importance": True}, None),
        ({"policy_loss": "reinforce"}, None),
        ({"overlong": {"mode": "none", "buffer": 99}}, None),
        ({"dynamic_sampling": {"enabled": True, "max_rounds": 4}}, None),
    ],
    ids=[
        *(
            "default penalty",
            "rewards of 1 and -1",
            "unknown rewards",
            "mask",
            "k1 in the reward",
            "k1 weighed",
            "once",
        ),
        *("no penalty", "dynamic sampling"),
    ],
)
def test_a_sensible_setting_is_not(grpo: dict[str, Any], environment: dict[str, Any] | None) -> None:
    assert warned(grpo, environment) == []


def test_limits_of_prompts_for_one_of_several_environments_are_read() -> None:
    grpo = {"dynamic_sampling": {"max_rounds": 4}, "kl_estimator": "k2"}
    own = {"dynamic_sampling": {"enabled": True}, "kl_beta": 0.1}
    recipe = tiny_run(grpo=grpo).model_dump(by_alias=True, exclude_unset=True, exclude={"environment"})
    arithmetic = {"name": "arithmetic", "args": {"draws": 10}}
    several = [arithmetic | {"id": "sums", "grpo": own}, arithmetic | {"id": "other"}]
    assert list(warnings(RunConfig.model_validate(recipe | {"environments": several}))) == []
    assert len(list(warnings(RunConfig.model_validate(recipe | {"environments": several[1:]})))) == 2


@pytest.mark.parametrize("name", shipped_recipes())
def test_no_shipped_recipe_is_warned_about(name: str) -> None:
    assert list(warnings(load_recipe(name).config)) == []
