"""Settings of a recipe that rarely teach what its author means. Pure, no torch: asked before a run is started."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.grpo import GrpoConfig
from megatron_rl.recipe.kept_answers import DynamicSamplingConfig
from megatron_rl.recipe.registry import environment_arguments, environment_class


def warnings(config: RunConfig) -> Iterator[str]:
    if config.supervised:
        return
    of_penalties = [_of_penalties(one, config.algorithms.by(getattr(one, "id", ""))) for one in _trained_on(config)]
    of_buffers = [_of_buffer(one, config.sampling.max_new_tokens) for one in config.algorithms.each]
    yield from dict.fromkeys(chain(*of_penalties, *of_buffers, *map(_of_terms, config.algorithms.each)))
    yield from _unread(config)


def _unread(config: RunConfig) -> Iterator[str]:
    """Keys whose value differs from the default, where nothing turns on what they shape."""
    grpo, algorithms = config.grpo, config.algorithms
    penalty = ("kl_estimator", "kl_in", "kl_importance")
    changed = [name for name in penalty if getattr(grpo, name) != GrpoConfig.model_fields[name].default]
    if changed and not algorithms.penalise_kl:
        yield (
            f"grpo.{changed[0]} is {getattr(grpo, changed[0])}, and grpo.kl_beta is 0, so that there is no KL penalty: "
            f"set kl_beta, or leave {changed[0]} out"
        )
    rounds = grpo.dynamic_sampling.max_rounds
    filters = any(each.dynamic_sampling.enabled for each in algorithms.each)
    if rounds != DynamicSamplingConfig.model_fields["max_rounds"].default and not filters:
        yield (
            f"grpo.dynamic_sampling.max_rounds is {rounds}, and enabled is false, so that no group is replaced: set "
            "enabled to true, or leave max_rounds out"
        )


def _of_buffer(grpo: GrpoConfig, limit: int) -> Iterator[str]:
    overlong = grpo.overlong
    if overlong.mode == "penalty" and 3 * overlong.buffer > limit:
        yield (
            f"grpo.overlong.buffer is {overlong.buffer} of the {limit} tokens of sampling.max_new_tokens: an answer is "
            f"penalised from {limit - overlong.buffer} tokens on. Set buffer to {-(-limit // 5)}, a fifth as in DAPO"
        )


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
    if environment.reward_weights is not None:
        return None
    wrong = environment_class(environment.name).reward_of_wrong(environment_arguments(environment))
    return None if wrong is None else 1.0 - wrong
