"""Keys of the loss that contradict one another are refused with the key and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from core_helpers import tiny_run
from pydantic import ValidationError

from megatron_rl.algorithms.policy_losses import LOSSES
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.grpo import READ_BY, GrpoConfig

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown loss": ({"policy_loss": "gsop"}, r"unknown name 'gsop' \(did you mean 'gspo'\?\)"),
    "no function": ({"policy_loss": "mine:"}, "not of the form module:function"),
    "dual clip of another loss": (
        {"policy_loss": "cispo", "dual_clip": 3.0},
        "dual_clip 3.0 is not read by policy_loss cispo, only by clip: set dual_clip to null",
    ),
    "clip range of a loss without bounds": (
        {"policy_loss": "sapo", "eps_high": 0.28},
        "eps_high 0.28 is not read by policy_loss sapo, only by clip, gspo, gspo_token, cispo, dppo",
    ),
    "temperature of another loss": (
        {"sapo_tau_negative": 1.05},
        "sapo_tau_negative 1.05 is not read by policy_loss clip",
    ),
    "divergence of another loss": ({"dppo_divergence": "kl"}, "dppo_divergence kl is not read by policy_loss clip"),
    "clip range of tokens for gspo": (
        {"policy_loss": "gspo", "eps_low": 0.2},
        "eps_low 0.2 would clip nothing.*0.0003 and 0.0004",
    ),
    "gspo with masks of tokens": (
        {"policy_loss": "gspo", "rejection": {"lower": 0.5, "upper": 2.0}},
        "rejection.level token.*policy_loss gspo.*set rejection.level to sequence",
    ),
    "length without its reduction": ({"reduction_length": 100}, "read only by reduction: constant"),
    "weighed penalty in the reward": (
        {"kl_beta": 0.1, "kl_in": "reward", "kl_importance": True},
        "kl_importance weighs the penalty in the loss, and kl_in is reward",
    ),
    "weights without bounds": ({"importance": {}}, "needs a bound, such as upper: 2.0"),
    "bounds in the wrong order": ({"importance": {"lower": 2.0, "upper": 1.0}}, "lower 2.0 is above upper 1.0"),
    "rejection of everything": (
        {"rejection": {"lower": 1.0, "upper": 2.0}},
        "must include 1, the ratio of tokens that need no correction",
    ),
    "a mask of earlier versions": (
        {"importance": {"level": "geometric", "mode": "mask", "upper": 2.0}},
        "mode is of earlier versions.*in place of mode: mask give grpo.rejection the same level, lower and upper",
    ),
    "a bound of earlier versions": ({"importance": {"mode": "truncate", "cap": 2.0}}, "upper .once cap."),
}


@pytest.mark.parametrize(("keys", "why"), REFUSED.values(), ids=REFUSED)
def test_contradiction_is_refused_with_its_key(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        GrpoConfig.model_validate(keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"policy_loss": "gspo", "rejection": {"level": "geometric", "lower": 0.5, "upper": 2.0}},
        {"policy_loss": "gspo_token", "rejection": {"lower": 0.5, "upper": 2.0}},
        {"importance": {"upper": 2.0}, "rejection": {"level": "geometric", "lower": 0.99, "upper": 1.01}},
        {"policy_loss": "mine:loss", "dual_clip": 3.0, "sapo_tau_positive": 2.0},  # one's own loss may read any key
        {"importance": {"lower": 0.5}},
    ],
    ids=[
        "gspo with rejected answers",
        "gspo_token with rejected tokens",
        "weights of tokens beside rejected answers",
        "own loss",
        "only a lower bound",
    ],
)
def test_sensible_combinations_are_accepted(keys: dict[str, Any]) -> None:
    GrpoConfig.model_validate(keys)


def test_default_bounds_are_those_of_the_loss() -> None:
    assert GrpoConfig().clip_range == (0.2, 0.2)
    assert GrpoConfig(policy_loss="gspo").clip_range == (0.0003, 0.0004)
    assert GrpoConfig(policy_loss="dppo").clip_range == (0.15, 0.15)
    assert GrpoConfig(policy_loss="dppo", dppo_divergence="kl").clip_range == (0.05, 0.05)
    assert GrpoConfig(policy_loss="cispo", eps_high=1.0).clip_range == (1.0, 1.0)
    assert GrpoConfig(eps_high=0.28).clip_range == (0.2, 0.28)


def test_every_loss_says_which_keys_it_reads() -> None:
    assert READ_BY.keys() == LOSSES.keys()


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_ratios_of_answers_are_needed_where_weights_or_rejection_read_them(level: str) -> None:
    for key in ("importance", "rejection"):
        assert GrpoConfig.model_validate({key: {"level": level, "upper": 2.0}}).compares_answers
        assert not GrpoConfig.model_validate({key: {"upper": 2.0}}).compares_answers


@pytest.mark.parametrize(
    ("sections", "importance", "dual_clip"),
    [
        ({}, None, None),
        ({"async": {"max_lag": 1}}, 2.0, 3.0),
        ({"async": {"max_lag": 1}, "grpo": {"importance": None, "dual_clip": None}}, None, None),
        ({"async": {"max_lag": 1}, "grpo": {"rejection": {"upper": 2.0}}}, None, 3.0),
        ({"async": {"max_lag": 1}, "grpo": {"policy_loss": "cispo"}}, 2.0, None),
        ({"grpo": {"iterations": 2}}, None, 3.0),
        ({"grpo": {"global_batch": 16, "dual_clip": 10.0}}, None, 10.0),
    ],
    ids=["on policy", "lag", "off", "rejection alone", "another loss", "several updates", "given"],
)
def test_tokens_that_may_be_off_policy_are_bounded_by_default(
    sections: dict[str, Any], importance: float | None, dual_clip: float | None
) -> None:
    """Null turns a bound off, and a configuration that was written out is read as it was."""
    batch = {"prompts_per_step": 4, "group_size": 8}
    config = tiny_run(**sections | {"grpo": batch | sections.get("grpo", {}), "resume": {"partial": "keep"}})
    for one in (config, RunConfig.model_validate(config.model_dump(by_alias=True))):
        assert (one.grpo.importance.upper if one.grpo.importance else None) == importance
        assert one.grpo.dual_clip == dual_clip


def test_values_that_runs_of_earlier_versions_recorded_are_read_as_they_were_meant() -> None:
    """Such a run resumes: `mode: truncate` is what importance does, and a penalty that `mode: none` does not read was
    written out with another default, so it must not count as set."""
    truncating = {"level": "token", "mode": "truncate", "lower": None, "upper": 2.0}
    assert GrpoConfig.model_validate({"importance": truncating}) == GrpoConfig.model_validate(
        {"importance": {"upper": 2.0}}
    )
    unread = {"mode": "none", "buffer": 0, "penalty": 1.0}
    assert GrpoConfig.model_validate({"overlong": unread}) == GrpoConfig()
    read = {"mode": "penalty", "buffer": 10, "penalty": 1.0}
    assert GrpoConfig.model_validate({"overlong": read}).overlong.penalty == 1.0
    turned_off = {"mode": "none", "buffer": 10, "penalty": 0.3}
    assert GrpoConfig.model_validate({"overlong": turned_off}).model_dump()["overlong"] == turned_off


@pytest.mark.parametrize("given", [{"buffer": 1024, "penalty": 0.3}, {"penalty": 1.0}, {"buffer": 0}])
def test_a_penalty_without_its_mode_is_refused(given: dict[str, Any]) -> None:
    """Nothing would be penalised."""
    with pytest.raises(ValueError, match=f"{min(given)} is set, and mode is not.*set mode to penalty, or leave"):
        GrpoConfig.model_validate({"overlong": given})
