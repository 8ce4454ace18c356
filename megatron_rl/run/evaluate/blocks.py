"""Answers to an evaluation's problems, in blocks, on the first rank of each replica.

Only complete blocks are kept; an interrupted block is answered again. So an answer is always computed beside the same
other answers, however often the evaluation is interrupted, even on a device whose sums depend on them: on a CPU the
result is the same bit for bit. Replicas answer one block each at a time, and the first one keeps the answers of all.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from megatron_rl.agent.api import Environment
from megatron_rl.agent.trajectories import Problem
from megatron_rl.checkpoint.source import PolicySource
from megatron_rl.contract.evaluation_records import GREEDY, SAMPLED, ProblemAnswers, ProblemKey
from megatron_rl.generate.engine.interface import InferenceInterface
from megatron_rl.learn.rollout.evaluation_answers import AnswerPlan, answer_problems
from megatron_rl.recipe.evaluation_job import Evaluation
from megatron_rl.run.evaluate.answer_file import AnswerFile

T = TypeVar("T")

Waits = Callable[[], AbstractContextManager[None]]  # context to enter while this rank waits for others


class AnsweringEngine(InferenceInterface, Protocol):
    @property
    def policy_version(self) -> int:
        """Number of optimizer steps behind its weights."""
        ...

    @property
    def busy_s(self) -> float: ...


class RunBlock(Protocol):
    """Runs work of the environment, such as a block, in the event loop of the evaluation."""

    def __call__(self, work: Coroutine[Any, Any, T], engine: AnsweringEngine) -> T | None:
        """Return the result; None if the process was asked to leave."""


@dataclass(frozen=True, slots=True)
class EvaluationProgress:
    set: str
    mode: str
    done: int  # answered problems, over all sets and modes
    of: int
    waits_for: str = ""  # work that the first answer waits for


@dataclass(frozen=True, slots=True)
class _Block:
    set: str
    mode: str
    problems: range

    @property
    def keys(self) -> list[ProblemKey]:
        return [(self.set, self.mode, problem) for problem in self.problems]


def blocks(sizes: Mapping[str, int], modes: Mapping[str, int], rows: int) -> Iterator[_Block]:
    """Yield the blocks in their order.

    Args:
        sizes: number of problems of each set.
        modes: number of answers to each problem.
        rows: answers that the engine decodes at once. A block has twice as many, so that few rows stay empty.
    """
    for name, size in sizes.items():
        for mode, samples in modes.items():
            problems = max(1, -(-2 * rows // samples))
            for first in range(0, size, problems):
                yield _Block(name, mode, range(first, min(size, first + problems)))


@dataclass(frozen=True, slots=True)
class OpenedEvaluation:
    """Open policy of an evaluation, on the first rank of a replica."""

    engine: AnsweringEngine
    source: PolicySource
    digest: str
    name: str = "native"  # engine, with its version if it is not of this project
    replica: int = 0
    replicas: int = 1
    leaders: dist.ProcessGroup | None = None
    """First ranks of all replicas, over gloo; None if there is one replica without a process group."""


@dataclass(frozen=True, slots=True)
class BlockRunner:
    """The blocks that remain, divided among the replicas; on the first rank of one replica."""

    evaluation: Evaluation
    environment: Environment
    opened: OpenedEvaluation
    sets: Mapping[str, Sequence[Problem]]
    rows: int
    run: RunBlock
    report: Callable[[EvaluationProgress], None]
    waits: Waits

    def run_all(self, answers: AnswerFile) -> bool:
        """Make all replicas answer the remaining blocks, and keep their answers. Returns whether all are answered."""
        sizes = {name: len(problems) for name, problems in self.sets.items()}
        left = [
            block
            for block in blocks(sizes, self._modes, self.rows)
            if not all(key in answers.known for key in block.keys)
        ]
        return self._answer(self._from_first(left), answers.add)

    def run_share(self) -> None:
        self._answer(self._from_first([]), lambda lines: None)

    @property
    def _modes(self) -> dict[str, int]:
        return {SAMPLED: self.evaluation.k} | ({GREEDY: 1} if self.evaluation.greedy else {})

    def _answer(self, left: list[_Block], keep: Callable[[list[ProblemAnswers]], None]) -> bool:
        opened = self.opened
        total = len(self._modes) * sum(map(len, self.sets.values()))
        # Some answers of an interrupted block may be known. They do not count: the whole block is answered again.
        done = total - sum(len(block.problems) for block in left)
        # All replicas go round this loop equally often, because `_gathered` is collective: a replica without a block in
        # the last round sends an empty list. None means that a replica was asked to leave and has given up its block.
        # The others learn of it in the same round, keep what they have answered, and all break together; a replica that
        # left alone would leave the others waiting for it in the next collective.
        for first in range(0, len(left), opened.replicas):
            together = left[first : first + opened.replicas]
            self.report(EvaluationProgress(together[0].set, together[0].mode, done, total))
            own = together[opened.replica] if opened.replica < len(together) else None
            found = self._gathered([] if own is None else self._lines(own))
            for lines in filter(None, found):
                keep(lines)
                done += len(lines)
            if None in found:
                break
        self.report(EvaluationProgress("", "", done, total))
        return done == total

    def _lines(self, block: _Block) -> list[ProblemAnswers] | None:
        """Return the answers of a block; None if it was given up."""
        evaluation, engine = self.evaluation, self.opened.engine
        problems = {number: self.sets[block.set][number] for number in block.problems}
        plan = AnswerPlan(block.set, block.mode, self._modes[block.mode], evaluation.sampling, evaluation.seed)
        return self.run(answer_problems(self.environment, problems, plan, engine, evaluation.environment), engine)

    def leave(self) -> None:
        """Wait for all replicas, so that they leave together."""
        self._gathered(None)

    def _from_first(self, left: list[_Block]) -> list[_Block]:
        """Return the first replica's argument, on all replicas."""
        shared = [left]
        if self.opened.replicas > 1:
            with self.waits():
                dist.broadcast_object_list(shared, group=self.opened.leaders, group_src=0)
        return shared[0]

    def _gathered(self, own: T) -> list[T]:
        """Return the arguments of all replicas, in their order."""
        if (count := self.opened.replicas) == 1:
            return [own]
        found: list[Any] = [None] * count
        with self.waits():
            dist.all_gather_object(found, own, group=self.opened.leaders)
        return found
