"""Contracts between the trainer and the code that produces experience: problems in, scored trajectories out.

    problem -> rollout request -> completions -> scored trajectories -> group

An agent decides how a problem becomes prompts, how often to call the model, and how to score the answers. It sees the
model only through an `InferenceInterface`, so it cannot distinguish a co-located engine from a remote one.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.recorded_answers import RecordedAnswer
from megatron_rl.agent.scoring import CheckedReward, RolloutLimits, all_of
from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.generate.engine.interface import InferenceInterface, PromptTooLong
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.inference import Sampling
from megatron_rl.recipe.registry import RegisteredEnvironment, environment_arguments, environment_class

if TYPE_CHECKING:  # imports an HTTP client, which is slow; the launcher imports this module to check a recipe
    from megatron_rl.generate.replicas.fixed_replicas import Running

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupRolloutRequest:
    ordinal: int | None
    """Position in the prompt stream; None in an evaluation."""
    problem: Problem
    group_size: int
    sampling: Sampling
    key: int
    """Key of the group's random numbers: see `GenerationRequest.key`."""
    inference: InferenceInterface
    limits: RolloutLimits


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    problems: Sequence[Problem]
    sampling: Sampling
    samples_per_problem: int
    key: int
    inference: InferenceInterface
    limits: RolloutLimits


@dataclass(frozen=True, slots=True)
class EvaluationResponse:
    trajectories: list[list[Trajectory]]
    """One list per problem, in the order of the request."""
    failures: Mapping[str, int] = field(default_factory=dict)
    final_answers: Mapping[int, Sequence[str | None]] = field(default_factory=dict)
    """Final answers by the problem's index in the request: see `EvaluationAgent.final_answer`. Filled only by an agent
    in another process."""

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward for group in self.trajectories for trajectory in group]


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """Problems to train on, pass after pass in the same sequence."""

    environment: str
    """Id of the problems' environment; empty if there is only one environment."""
    weight: float
    """Share of each step's prompts, relative to the sum of all weights; above 0."""
    problems: Sequence[Problem]


SLOW_S = 1.0
"""Seconds per answer from which a function that scores is named to the user."""


class Scoring(NamedTuple):
    function: str
    answers: int
    seconds: float
    """Seconds per answer."""

    def note(self, answers: str) -> str:
        """Describe a slow function; empty for a quick one. answers: those that it scores in a run, in words."""
        if self.seconds < SLOW_S:
            return ""
        return f"{self.function} takes {self.seconds:.2g} s an answer, {answers}"


class ScoringAgent(ABC):  # noqa: B024 - its only method has a default
    def scoring(self) -> Scoring | None:
        """Return the progress of the slowest function that scores answers one at a time; None if there is none."""
        return None


class GroupedRolloutGenerator(ScoringAgent):
    @abstractmethod
    def training_problems(self) -> Sequence[Problem]:
        """Return all distinct training problems, in a fixed order."""

    def training_sets(self) -> Sequence[TrainingSet]:
        """Return the training problems grouped by weight: at least one set."""
        return [TrainingSet("", 1.0, self.training_problems())]

    @abstractmethod
    async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
        """Answer one problem `group_size` times and score every answer."""

    async def close(self) -> None:
        """Close open resources such as connections. The agent is not called afterwards."""


class EvaluationAgent(ScoringAgent):
    prompt_format: str = ""
    """Answer format that the prompts request, if a recipe can choose one. It is recorded with every evaluation, because
    scores in different formats are not comparable."""

    compares_answers: bool = False
    """Whether `final_answer` can match equivalent answers to a problem, as majority votes need."""

    repeatable: bool = True
    """Whether the same tokens of the model lead to the same rollout. A program of the user's may do anything."""

    several_turns: bool = False
    """Whether a rollout may be longer than a problem's prompt and one answer."""

    def final_answer(self, response: str) -> str | None:
        """Return the final answer of a response, the same text for equivalent answers; None if the response has no
        answer."""
        raise NotImplementedError(f"{type(self).__name__} does not compare answers")

    def agent_of(self, problem: Problem) -> EvaluationAgent:
        return self

    @abstractmethod
    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        """Return the evaluation sets by name, e.g. `trained` and `held_out`; no problem of `held_out` is trained on."""

    @abstractmethod
    async def evaluate(self, request: EvaluationRequest) -> EvaluationResponse:
        """Answer and score every problem."""


class Demonstrator(ABC):
    """Provides worked answers, from which `model.init: supervised` teaches the answer format."""

    @abstractmethod
    def demonstrations(self) -> Sequence[tuple[str, str]]:
        """Return (prompt, right answer) pairs; none of them comes from a held-out set."""


class Environment(RegisteredEnvironment, GroupedRolloutGenerator, EvaluationAgent):
    """Problems, prompts and rewards of one task: the value of `environment` in a recipe. `mrl environments` shows the
    first sentence of the class's docstring.

    A package provides an environment by registering its class as an entry point of the group `mrl.environments`.
    """

    @abstractmethod
    def __init__(self, config: Any, tokenizer: Tokenizer) -> None:
        """Build the environment from `config`, an instance of the class's own `Config`."""

    async def evaluate(self, request: EvaluationRequest) -> EvaluationResponse:
        """Begin all problems at once; the engine decides how many to answer concurrently."""
        samples = request.samples_per_problem

        async def answered(index: int, problem: Problem) -> TrajectoryGroup:
            key = stable_key("evaluation", request.key, index)
            asked = GroupRolloutRequest(
                None, problem, samples, request.sampling, key, request.inference, request.limits
            )
            try:
                return await self.group_rollout(asked)
            except PromptTooLong as error:
                logger.warning("problem %d of an evaluation is lost: %s", index, error)
                return TrajectoryGroup(0, problem, [], {"the prompt is too long": samples})

        groups = await all_of(map(answered, count(), request.problems))
        failures = sum((Counter(group.failures) for group in groups), Counter[str]())
        finals = {place: group.final_answers for place, group in enumerate(groups) if group.final_answers}
        return EvaluationResponse([group.trajectories for group in groups], failures, finals)

    async def rescore(self, problem: Problem, answer: RecordedAnswer, limits: RolloutLimits) -> CheckedReward | str:
        """Score a recorded answer again, or return the reason why it has no score.

        Raises NotImplementedError for an environment whose answers are scored elsewhere, as by an agent server.
        """
        raise NotImplementedError(f"{type(self).__name__} does not score answers itself")

    def use_reward_model(self, running: Running, limit_s: float) -> None:
        """Have answers scored by the replicas of the run's reward model, where the arguments name no other scorer.

        limit_s: seconds that all replicas may be away.
        """

    def tracebacks(self) -> Mapping[str, str]:
        """Return tracebacks of errors in the environment's own code that lost answers. The keys are the prefixes of the
        reasons in `TrajectoryGroup.failures`."""
        return {}

    def gold_response(self, problem: Problem) -> str:
        """Return a right response to the problem, as a model would write it."""
        raise NotImplementedError(f"{type(self).__name__} has no gold_response")

    def wrong_response(self, problem: Problem) -> str:
        """Return a wrong response to the problem, as a model would write it."""
        return "I do not know."


def build_environment(config: EnvironmentConfig, tokenizer: Tokenizer) -> Environment:
    """Build the environment that a recipe names. Raises ValueError as `environment_arguments` does."""
    built = environment_class(config.name)(environment_arguments(config), tokenizer)
    if not isinstance(built, Environment):
        raise ValueError(f"environment {config.name!r} is not a subclass of {__name__}.Environment")
    return built
