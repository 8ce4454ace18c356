"""Several environments combined into one, each with its share of every step: the recipe key `environments`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from megatron_rl.agent.api import (
    Demonstrator,
    Environment,
    GroupRolloutRequest,
    Scoring,
    TrainingSet,
    build_environment,
)
from megatron_rl.agent.datasets import words_key
from megatron_rl.agent.indexed_problems import IndexedProblems
from megatron_rl.agent.recorded_answers import RecordedAnswer
from megatron_rl.agent.scoring import CheckedReward, RolloutLimits
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.environment_section import Environments, WeightedEnvironment
from megatron_rl.recipe.registry import asks_reward_model, check_files, required_datasets, required_extras, used_files
from megatron_rl.recipe.section import Section

logger = logging.getLogger(__name__)

if TYPE_CHECKING:  # as in agent.api
    from megatron_rl.generate.replicas.fixed_replicas import Running


class MultiTaskConfig(Section):
    """Arguments of the environment `multi-task`."""

    environments: Environments
    """Environments, each with its share (`weight`) of the prompts."""

    def datasets(self) -> list[str]:
        return sorted({*chain.from_iterable(map(required_datasets, self.environments))})

    def extras(self) -> list[str]:
        return sorted({*chain.from_iterable(map(required_extras, self.environments))})

    @property
    def asks_run(self) -> bool:
        """Whether one of them asks the reward model that the run starts."""
        return any(map(asks_reward_model, self.environments))

    def check_files(self) -> None:
        for one in self.environments:
            check_files(one)

    def files(self) -> list[str]:
        return sorted({*chain.from_iterable(map(used_files, self.environments))})


class WeightedMultiTask(Environment, Demonstrator):
    """Several environments at once, by weight: the recipe key `environments`. No environment is trained on a problem
    that an environment with `evaluation_only` holds out, in whatever prompt."""

    Config = MultiTaskConfig

    def __init__(self, config: MultiTaskConfig, tokenizer: Tokenizer) -> None:
        self._config = {one.id: one for one in config.environments}
        self._members = {one.id: _build(one, at, tokenizer) for at, one in enumerate(config.environments)}
        self._evaluation_sets = {
            f"{id}/{name}": _with_environment(id, problems)
            for id, member in self._members.items()
            for name, problems in member.evaluation_problems().items()
        }
        evaluating = [self._members[id] for id, one in self._config.items() if one.evaluation_only]
        self._held_out = {*chain.from_iterable(map(_held_out, evaluating))}
        self._left_out: set[bytes] = set()  # keys of prompts to train on that are held out
        self._training_sets = [
            TrainingSet(
                id, one.weight, _with_environment(id, self._without_held_out(id, self._members[id].training_problems()))
            )
            for id, one in self._config.items()
            if one.trained_on
        ]
        for each in self._training_sets:
            if not each.problems:
                raise ValueError(
                    f"environment {each.environment!r} has no training problems that no other one holds out: set "
                    "evaluation_only"
                )
        evaluated = {problem.environment for problems in self._evaluation_sets.values() for problem in problems}
        for id, one in self._config.items():
            if one.evaluation_only and id not in evaluated:
                raise ValueError(f"environment {id!r} is evaluation_only and has no evaluation problems")
        formats = {id: member.prompt_format for id, member in self._members.items() if member.prompt_format}
        self.prompt_format = "; ".join(f"{id}: {text}" for id, text in formats.items())
        self.compares_answers = all(member.compares_answers for member in self._members.values())

    def training_problems(self) -> Sequence[Problem]:
        return [problem for each in self._training_sets for problem in each.problems]

    def training_sets(self) -> Sequence[TrainingSet]:
        return self._training_sets

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return self._evaluation_sets

    def agent_of(self, problem: Problem) -> Environment:
        return self._members[problem.environment]

    def demonstrations(self) -> Sequence[tuple[str, str]]:
        trained = [self._members[each.environment] for each in self._training_sets]
        pairs = [pair for member in trained if isinstance(member, Demonstrator) for pair in member.demonstrations()]
        held_out = self._held_out | self._left_out
        return [pair for pair in pairs if words_key(pair[0]) not in held_out]

    async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
        id = request.problem.environment
        return await self._members[id].group_rollout(replace(request, limits=RolloutLimits.of(self._config[id])))

    async def rescore(self, problem: Problem, answer: RecordedAnswer, limits: RolloutLimits) -> CheckedReward | str:
        id = problem.environment
        return await self._members[id].rescore(problem, answer, RolloutLimits.of(self._config[id]))

    def use_reward_model(self, running: Running, limit_s: float) -> None:
        for member in self._members.values():
            member.use_reward_model(running, limit_s)

    def tracebacks(self) -> Mapping[str, str]:
        return {kind: trace for member in self._members.values() for kind, trace in member.tracebacks().items()}

    def scoring(self) -> Scoring | None:
        found = [one for member in self._members.values() if (one := member.scoring()) is not None]
        slowest = max(found, key=lambda one: one.seconds, default=None)
        return slowest._replace(answers=sum(one.answers for one in found)) if slowest is not None else None

    async def close(self) -> None:
        for member in self._members.values():
            await member.close()

    def _without_held_out(self, id: str, problems: Sequence[Problem]) -> Sequence[Problem]:
        if not self._held_out:
            return problems
        kept = []
        for problem in problems:
            if self._held_out.isdisjoint(_keys(problem)):
                kept.append(problem)
            else:
                self._left_out.add(words_key(problem.prompt))
        if missing := len(problems) - len(kept):
            logger.info(
                "environment %r: %d training problems skipped: an environment with evaluation_only holds them out",
                *(id, missing),
            )
        return kept


def _build(config: WeightedEnvironment, place: int, tokenizer: Tokenizer) -> Environment:
    """Raises ValueError, with the key in the list if the environment names one.

    place: index of the environment in the list.
    """
    try:
        return build_environment(config, tokenizer)
    except ValueError as error:
        reason = str(error).removeprefix("environment.args.")
        where = f"environment {config.id!r}: " if reason == str(error) else f"environments.{place}.args."
        raise ValueError(where + reason) from error


def _keys(problem: Problem) -> frozenset[bytes]:
    """Return the keys by which a problem is known: those of its question, and that of its prompt."""
    return problem.questions | {words_key(problem.prompt)}


def _held_out(environment: Environment) -> set[bytes]:
    """Return the keys of the problems that an environment evaluates on and does not train on itself."""
    evaluated = chain.from_iterable(environment.evaluation_problems().values())
    trained = {*chain.from_iterable(map(_keys, environment.training_problems()))}
    return {*chain.from_iterable(keys for keys in map(_keys, evaluated) if trained.isdisjoint(keys))}


def _with_environment(id: str, problems: Sequence[Problem]) -> Sequence[Problem]:
    if isinstance(problems, IndexedProblems):
        return problems.of(id)
    return [replace(problem, environment=id) for problem in problems]
