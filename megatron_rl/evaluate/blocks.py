"""BlockRunner an evaluation's problems, as far as they are not answered yet, on the first rank of each replica.

A block of them at a time: whole blocks are kept, and one that was cut short is answered again. So every answer is made
beside the same others however often the evaluation is interrupted, and does not depend on whether the device adds up
alike beside others: on a CPU the result is the same bit for bit. Replicas answer a block each at the same time; the
first one keeps what they all have found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_rl.agent.api import Environment, EvaluationAgent, EvaluationRequest, EvaluationResponse
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.trajectories import Problem, Trajectory
from megatron_rl.contract.evaluation_records import GREEDY, SAMPLED, ProblemAnswers, ScoredAnswer
from megatron_rl.evaluate.answer_file import AnswerFile
from megatron_rl.evaluate.config import Evaluation
from megatron_rl.inference.engine import Engine
from megatron_rl.standalone.policy import OpenedPolicy

T = TypeVar("T")

UNEXPLAINED = "the environment does not say why"

Waits = Callable[[], AbstractContextManager[None]]
"""What to enter while this rank waits for others."""

RunBlock = Callable[[Coroutine[Any, Any, list[EvaluationResponse]], Engine], list[EvaluationResponse] | None]
"""Drives a block to its end; None where it was given up because the process was asked to leave."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an evaluation is."""

    set: str
    mode: str
    done: int
    """Problems answered, of all sets and modes together."""
    of: int


@dataclass(frozen=True, slots=True)
class _Block:
    """Problems that are answered together."""

    set: str
    mode: str
    problems: range

    @property
    def places(self) -> list[tuple[str, str, int]]:
        return [(self.set, self.mode, problem) for problem in self.problems]


def blocks(sizes: Mapping[str, int], modes: Mapping[str, int], rows: int) -> Iterator[_Block]:
    """What is answered together, in its order.

    Args:
        sizes: problems of each set.
        modes: answers to each problem.
        rows: answers that the engine decodes at once: a block is twice as large, so that few rows stay empty.
    """
    for name, size in sizes.items():
        for mode, samples in modes.items():
            problems = max(1, -(-2 * rows // samples))
            for first in range(0, size, problems):
                yield _Block(name, mode, range(first, min(size, first + problems)))


@dataclass(frozen=True, slots=True)
class BlockRunner:
    """All blocks that are left, shared out over the replicas, on the first rank of one of them."""

    evaluation: Evaluation
    environment: Environment
    opened: OpenedPolicy
    sets: Mapping[str, Sequence[Problem]]
    rows: int
    run: RunBlock
    report: Callable[[Progress], None]
    waits: Waits

    def lead(self, answers: AnswerFile) -> bool:
        """Have all replicas answer what is not known, and keep it; whether all is answered now."""
        sizes = {name: len(problems) for name, problems in self.sets.items()}
        left = [
            block
            for block in blocks(sizes, self._modes, self.rows)
            if not all(place in answers.known for place in block.places)
        ]
        return self._answer(self._told(left), answers.add)

    def help(self) -> None:
        """Answer this replica's share of them."""
        self._answer(self._told([]), lambda lines: None)

    @property
    def _modes(self) -> dict[str, int]:
        """AnswerFile to each problem."""
        asked = self.evaluation.evaluate
        return {SAMPLED: asked.k} | ({GREEDY: 1} if asked.greedy else {})

    def _answer(self, left: list[_Block], keep: Callable[[list[ProblemAnswers]], None]) -> bool:
        ranks = self.opened.ranks
        total = len(self._modes) * sum(map(len, self.sets.values()))
        # Of a block that was cut short some answers may be known: they are made again with the others.
        done = total - sum(len(block.problems) for block in left)
        for first in range(0, len(left), ranks.count):
            together = left[first : first + ranks.count]
            self.report(Progress(together[0].set, together[0].mode, done, total))
            own = together[ranks.index] if ranks.index < len(together) else None
            found = self._gathered([] if own is None else self._lines(own))
            for lines in filter(None, found):
                keep(lines)
                done += len(lines)
            if None in found:
                break
        self.report(Progress("", "", done, total))
        return done == total

    def _lines(self, block: _Block) -> list[ProblemAnswers] | None:
        """What a block comes to; None where it was given up."""
        problems = [self.sets[block.set][problem] for problem in block.problems]
        samples, engine = self._modes[block.mode], self.opened.engine
        responses = self.run(_answer(self.evaluation, self.environment, engine, block, problems, samples), engine)
        if responses is None:
            return None
        return [
            _line(place, response, samples, self.environment.agent_of(problem))
            for place, response, problem in zip(block.places, responses, problems, strict=True)
        ]

    def part(self) -> None:
        """Leave when all do, which the first one says by leaving."""
        self._gathered(None)

    def _told(self, left: list[_Block]) -> list[_Block]:
        """What the first replica says."""
        told = [left]
        if self.opened.ranks.count > 1:
            with self.waits():
                dist.broadcast_object_list(told, group=self.opened.leaders, group_src=0)
        return told[0]

    def _gathered(self, own: T) -> list[T]:
        """What all replicas have, in their order."""
        if (count := self.opened.ranks.count) == 1:
            return [own]
        found: list[Any] = [None] * count
        with self.waits():
            dist.all_gather_object(found, own, group=self.opened.leaders)
        return found


async def _answer(
    evaluation: Evaluation,
    environment: Environment,
    engine: Engine,
    block: _Block,
    problems: Sequence[Problem],
    samples: int,
) -> list[EvaluationResponse]:
    """A request for each problem, so that its random numbers depend on its place in the set alone."""
    sampling = evaluation.sampling
    if block.mode == GREEDY:
        sampling = sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0})
    requests = [
        EvaluationRequest(
            problems=[problem],
            sampling=sampling,
            samples_per_problem=samples,
            key=stable_key(f"evaluate:{block.set}:{block.mode}", evaluation.evaluate.seed, place),
            inference=engine,
            limits=RolloutLimits.of(evaluation.environment),
        )
        for place, problem in zip(block.problems, problems, strict=True)
    ]
    return await asyncio.gather(*map(environment.evaluate, requests))


def _line(
    place: tuple[str, str, int], response: EvaluationResponse, samples: int, agent: EvaluationAgent
) -> ProblemAnswers:
    (trajectories,) = response.trajectories
    failures = dict(response.failures)
    if unexplained := samples - len(trajectories) - sum(failures.values()):
        failures[UNEXPLAINED] = unexplained
    finals: Sequence[str | None] = response.final_answers.get(0) or [
        agent.final_answer(answer.text) if agent.compares_answers else None for answer in trajectories
    ]
    return ProblemAnswers(*place, [*map(_scored, trajectories, finals)], failures)


def _scored(answer: Trajectory, final_answer: str | None) -> ScoredAnswer:
    return ScoredAnswer(
        reward=answer.reward,
        tokens=answer.answer_length,
        finish_reason=answer.finish_reason,
        text=answer.text,
        vote=final_answer,
    )
