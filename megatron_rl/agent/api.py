"""Contracts between the trainer and whatever produces experience: problems in, scored trajectories out.

    problem -> rollout request -> completions -> scored trajectories -> group

An agent decides how a problem becomes prompts, how often the model is called and what the answers are worth.
It sees the model only through an `InferenceInterface`, so it cannot tell a co-located engine from a remote one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.trajectories import ContrastivePair, Problem, Trajectory, TrajectoryGroup, contrastive_pair
from megatron_rl.inference.api import InferenceInterface
from megatron_rl.inference.config import Sampling
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.section import Section


@dataclass(frozen=True, slots=True)
class GroupRolloutRequest:
    ordinal: int
    problem: Problem
    group_size: int
    sampling: Sampling
    key: int
    """Key of the group's random numbers, see `GenerationRequest.key`."""
    inference: InferenceInterface
    limits: RolloutLimits


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One answer to each of several problems, which make no group."""

    problems: Sequence[Problem]
    sampling: Sampling
    key: int
    inference: InferenceInterface
    limits: RolloutLimits


@dataclass(frozen=True, slots=True)
class ContrastiveResponse:
    pair: ContrastivePair | None
    """None where no two answers are worth differently."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Answers lost, by reason."""


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
    """Answers lost, by reason."""
    final_answers: Mapping[int, Sequence[str | None]] = field(default_factory=dict)
    """What the answers to a problem come to, see `EvaluationAgent.final_answer`, by its place in the request; of those
    alone whose agent is in another process."""

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward for group in self.trajectories for trajectory in group]


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """Problems that are trained on, one after the other, in passes."""

    environment: str
    """Id of the environment that they are of; empty where there is only one."""
    weight: float
    """Share of the prompts of a step, over the sum of all weights; above 0."""
    problems: Sequence[Problem]


class RolloutGenerator(ABC):
    """Produces answers one by one, for what needs no groups: data to distil from, or to be filtered."""

    @abstractmethod
    async def rollouts(self, request: RolloutRequest) -> EvaluationResponse:
        """Answer every problem once, and score the answers."""


class ContrastiveRolloutGenerator(ABC):
    """Produces pairs of a better and a worse answer, for who trains on preferences."""

    @abstractmethod
    async def contrastive_rollout(self, request: GroupRolloutRequest) -> ContrastiveResponse:
        """Answer one problem `group_size` times, and choose a pair."""


class GroupedRolloutGenerator(ABC):
    """Produces the groups that GRPO trains on."""

    @abstractmethod
    def training_problems(self) -> Sequence[Problem]:
        """All distinct problems that may be trained on, in a fixed order."""

    def training_sets(self) -> Sequence[TrainingSet]:
        """The same, by what weight they are trained on: at least one set."""
        return [TrainingSet("", 1.0, self.training_problems())]

    @abstractmethod
    async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
        """Answer one problem `group_size` times and score every answer."""

    async def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of what is held open, such as connections: nothing is asked any more."""


class EvaluationAgent(ABC):
    """Measures the model on sets of problems."""

    prompt_format: str = ""
    """How answers are asked for, where a recipe can choose: recorded with every evaluation, because scores in
    different formats do not compare."""

    compares_answers: bool = False
    """Whether `final_answer` can tell that two answers to a problem say the same, for majority votes."""

    def final_answer(self, response: str) -> str | None:
        """What a response comes to, the same text for answers that say the same; None where it comes to nothing."""
        raise NotImplementedError(f"{type(self).__name__} does not compare answers")

    def agent_of(self, problem: Problem) -> EvaluationAgent:
        """Whose problem it is: this agent's, or that of one of several that it is made of."""
        return self

    @abstractmethod
    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        """Named sets, e.g. `trained` and `held_out`; none of the problems of `held_out` is trained on."""

    @abstractmethod
    async def evaluate(self, request: EvaluationRequest) -> EvaluationResponse:
        """Answer and score every problem."""


class Demonstrator(ABC):
    """Knows worked answers, from which `model.init: supervised` teaches the answer format."""

    @abstractmethod
    def demonstrations(self) -> Sequence[tuple[str, str]]:
        """(prompt, right answer) pairs; none of them from a held-out set."""


class Environment(GroupedRolloutGenerator, EvaluationAgent, RolloutGenerator, ContrastiveRolloutGenerator):
    """What a recipe names under `environment`: one task's problems, answers and rewards. The first sentence of its
    docstring describes it in `mrl environments`.

    A package provides one by registering the class as an entry point of the group `mrl.environments`.
    """

    Config: ClassVar[type[Section]]
    """Checks `environment.args` of the recipe, on the login node too: importing the class must need neither torch
    nor the task's own libraries.

    Where it has a method `datasets() -> list[str]`, those are the names of the data sets on the Hugging Face hub that
    the environment reads: `mrl prefetch` fetches them, since a job has no internet."""

    variant_argument: ClassVar[str] = ""
    """Argument that NAME/VARIANT gives: reasoning-gym/chain_sum is reasoning-gym with `dataset: chain_sum`. Empty where
    an environment has no variants."""

    @abstractmethod
    def __init__(self, config: Any, tokenizer: Tokenizer) -> None:
        """`config` is an instance of the class's own `Config`."""

    @classmethod
    def variants(cls) -> Mapping[str, str]:
        """What VARIANT may be in NAME/VARIANT, with a sentence on each; nothing where there is no telling."""
        return {}

    @classmethod
    def sample_arguments(cls) -> Mapping[str, Any]:
        """Arguments with which it has a few problems on any machine, offline: for `mrl environments try`."""
        return {}

    async def rollouts(self, request: RolloutRequest) -> EvaluationResponse:
        """As an evaluation of one answer each."""
        return await self.evaluate(
            EvaluationRequest(
                problems=request.problems,
                sampling=request.sampling,
                samples_per_problem=1,
                key=request.key,
                inference=request.inference,
                limits=request.limits,
            )
        )

    async def contrastive_rollout(self, request: GroupRolloutRequest) -> ContrastiveResponse:
        """The best and the worst of the group's answers."""
        group = await self.group_rollout(request)
        return ContrastiveResponse(contrastive_pair(group), group.failures)

    def tracebacks(self) -> Mapping[str, str]:
        """Tracebacks of the errors that its own code raised and that cost answers, by what their reasons in
        `TrajectoryGroup.failures` begin with."""
        return {}

    def gold_response(self, problem: Problem) -> str:
        """What a model would answer that is right."""
        raise NotImplementedError(f"{type(self).__name__} has no gold_response")

    def wrong_response(self, problem: Problem) -> str:
        """What a model would answer that is wrong."""
        return "I do not know."
