"""Settings of a recipe that rarely teach what its author means. Pure, no torch: asked before a run is started."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.grpo import GrpoConfig

BINARY = frozenset({"arithmetic", "code", "countdown", "math"})
"""Environments in which a right answer earns 1, and any other at most the largest of WRONG."""
WRONG = ("format_reward", "negative_reward")
"""Arguments of these environments: rewards of answers that are not right; 0 by default."""


def warnings(config: RunConfig) -> Iterator[str]:
    if config.supervised:
        return
    of_penalties = [_of_penalties(one, config.algorithms.by(getattr(one, "id", ""))) for one in _trained_on(config)]
    yield from dict.fromkeys(chain(*of_penalties, *map(_of_terms, config.algorithms.each)))


def _of_terms(grpo: GrpoConfig) -> Iterator[str]:
    if grpo.kl_beta > 0 and grpo.kl_in == "loss" and grpo.kl_estimator == "k1" and not grpo.kl_importance:
        yield (
            "grpo.kl_estimator is k1 and grpo.kl_in is loss: the gradient of this penalty is noise, which holds the "
            "policy nowhere. Set kl_estimator to k2 or k3, or kl_in to reward"
        )
    if grpo.policy_loss == "reinforce" and grpo.iterations > 1:
        yield (
            f"grpo.policy_loss is reinforce and grpo.iterations is {grpo.iterations}: without a ratio, passes "
            "after the first train as if the changed policy had sampled. Set iterations to 1, or policy_loss to clip"
        )


def _of_penalties(environment: EnvironmentConfig, grpo: GrpoConfig) -> Iterator[str]:
    if (difference := _difference(environment)) is None:
        return
    at_limit = grpo.overlong.penalty if grpo.overlong.mode == "penalty" else 0.0
    if at_limit >= difference:
        yield (
            f"grpo.overlong.penalty is {at_limit:g}, and a right answer earns only {difference:g} more than another: "
            "a right answer near the limit is taught to be as bad as a wrong one. Set penalty to "
            f"{difference / 2:g}, half of the difference as in DAPO"
        )
    if grpo.length_penalty / 2 >= difference:
        yield (
            f"grpo.length_penalty is {grpo.length_penalty:g}, and a right answer earns only {difference:g} more than "
            "another: the longest right answer loses half of length_penalty, and is taught to be as bad as a short "
            f"wrong one. Set length_penalty below {2 * difference:g}"
        )


def _trained_on(config: RunConfig) -> list[EnvironmentConfig]:
    if config.environment is not None:
        return [config.environment]
    return [one for one in config.environments or () if one.trained_on]


def _difference(environment: EnvironmentConfig) -> float | None:
    """Reward of a right answer less the largest of another one; None if it is not known."""
    if environment.name not in BINARY or environment.reward_weights is not None:
        return None
    return 1.0 - max(float(environment.args.get(name, 0.0)) for name in WRONG)
