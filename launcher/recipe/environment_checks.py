"""Environments of a recipe: whether their arguments are valid, and fit its other sections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from pydantic import ValidationError

from launcher.errors import BadInput
from launcher.recipe.problems import KeyPath, Locate, validation_problems
from megatron_rl.recipe.chat_section import EndpointConfig
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.distill import POLICY
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.registry import asks_reward_model, environment_arguments, environment_class


def environments_of(config: RunConfig) -> dict[KeyPath, EnvironmentConfig]:
    """Return the environments of a recipe by their keys."""
    if config.environment is not None:
        return {("environment",): config.environment}
    return {("environments", str(number)): one for number, one in enumerate(config.environments or ())}


def check_environments(config: RunConfig, locate: Locate) -> None:
    """Raise BadInput with every problem of the environments of a recipe: an unknown name, arguments that their Config
    refuses, and what does not fit the other sections."""
    problems = []
    for place, one in environments_of(config).items():
        of = f" (environment {one.name!r})" if config.environments else ""
        try:
            arguments = environment_arguments(one)
            if isinstance(arguments, EndpointConfig) and arguments.timeout_s >= config.job.silence_limit_s:
                key = (*place, "args", "timeout_s")
                problems.append(
                    f"{locate(key)[0]}: {'.'.join(key)} {arguments.timeout_s:g}{of} must be below job.silence_limit_s "
                    f"{config.job.silence_limit_s}: a program that works that long without a call looks like a hang"
                )
        except ValidationError as error:
            keys = environment_class(one.name).Config
            found = validation_problems(error, keys, locate, prefix=(*place, "args"))
            problems += [f"{problem}{of}" for problem in found]
        except ValueError as error:
            problems.append(f"{locate((*place, 'name'))[0]}: {'.'.join((*place, 'name'))}: {error}")
            continue
        if problem := _against_teacher_prompt(config, one):
            problems.append(f"{locate((*place, 'args'))[0]}: {'.'.join((*place, 'args'))}.{problem}{of}")
        credits = getattr(one, "trained_on", True) and not config.supervised
        if not credits or config.algorithms.by(getattr(one, "id", "")).turn_discount is None:
            continue
        if not getattr(environment_class(one.name), "several_turns", True):
            own = getattr(one, "grpo", None)
            section = (*place, "grpo") if own and "turn_discount" in own.model_fields_set else ("grpo",)
            problems.append(
                f"{locate((*section, 'turn_discount'))[0]}: {'.'.join(section)}.turn_discount is set, and environment "
                f"{one.name!r} answers in one turn: leave it out, or set it for the "
                "environments of agents alone (environments.N.grpo.turn_discount)"
            )
    problems += _of_reward_model(config, locate)
    if problems:
        raise BadInput(problems)


def _against_teacher_prompt(config: RunConfig, environment: EnvironmentConfig) -> str:
    """Return why the environment's own prompt for a teacher, or the lack of one, makes no sense; empty if it does."""
    trained_on = getattr(environment, "trained_on", True) and not config.supervised
    if not trained_on or "teacher_prompt" not in environment_class(environment.name).Config.model_fields:
        return ""
    given = environment.args.get("teacher_prompt") is not None
    teaching = config.teachings.by_id[getattr(environment, "id", "")]
    if given and teaching is None:
        return "teacher_prompt is given, and no teacher reads it: give distill, or leave it out"
    if not given and teaching is not None and teaching.teacher == POLICY:
        return "teacher_prompt is missing, and distill.teacher is policy, which would judge what it has read itself"
    return ""


def _of_reward_model(config: RunConfig, locate: Locate) -> Iterator[str]:
    """Refuse a reward model that nothing asks, and environments that ask one which the run does not start."""
    asking = []
    for place, one in environments_of(config).items():
        with suppress(ValueError):  # bad arguments are reported elsewhere
            asking += [place] * asks_reward_model(one)
    if config.reward is not None and not asking:
        yield (
            f"{locate(('reward',))[0]}: reward is given, and no environment asks it: give environment judge the "
            "argument reward_model without a url ({} is enough), or leave reward out"
        )
    for place in asking if config.reward is None else ():
        key = (*place, "args", "reward_model")
        yield (
            f"{locate(key)[0]}: {'.'.join(key)} has no url, and the run starts no reward model: give the url of a "
            "server and its model, or reward.model and reward.replicas.nodes"
        )
