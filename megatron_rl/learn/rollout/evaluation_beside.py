"""Evaluation beside training: a few replicas keep the weights of a step and answer, while the ranks train on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from megatron_rl.agent.api import EvaluationAgent
from megatron_rl.contract.evaluation_records import ProblemAnswers
from megatron_rl.generate.engine.interface import InferenceInterface
from megatron_rl.learn.rollout.agent_loop import AgentLoop
from megatron_rl.learn.rollout.evaluation import EvaluatedSet, scoring_progress, set_metrics, sets_after
from megatron_rl.learn.rollout.evaluation_answers import answer_problems
from megatron_rl.rank.control import Control
from megatron_rl.recipe.config import RunConfig

Lines = list[list[ProblemAnswers]]  # of each set


class KeepsWeights(Protocol):
    """Has engines keep the newest weights: see `refit.kept_version.VersionKeeper`."""

    def keep(self, most: int) -> tuple[InferenceInterface, Sequence[int]] | None: ...

    def release(self) -> None: ...


class EvaluationBeside:
    """One evaluation at a time. All methods except `stop` are collective over the training ranks."""

    def __init__(
        self, agent: EvaluationAgent, config: RunConfig, control: Control, loop: AgentLoop, weights: KeepsWeights
    ) -> None:
        self.step: int | None = None
        """Step whose weights answer; None: there is no unfinished evaluation."""
        self._agent, self._config, self._control, self._loop, self._weights = agent, config, control, loop, weights
        self._sets: list[EvaluatedSet] = []
        self._tasks: list[asyncio.Task[Lines]] = []  # of this rank's driver: one, or none if it answers nothing

    def begin(self, step: int) -> bool:
        """Begin to answer with the newest weights, those after `step`. Returns false, having begun nothing, if fewer
        than two replicas have them."""
        assert self.step is None and self._config.evaluation.replicas is not None
        kept = self._weights.keep(self._config.evaluation.replicas)
        if kept is None:
            return False
        inference, ranks = kept
        self.step, self._sets = step, sets_after(self._agent, self._config, step)
        if self._control.rank in ranks:
            work = partial(self._answer, inference, [*ranks].index(self._control.rank), len(ranks))
            self._tasks = [self._loop.do(lambda loop: loop.create_task(work()))]
        return True

    async def _answer(self, inference: InferenceInterface, index: int, count: int) -> Lines:
        task = self._config.task
        found: Lines = []
        for one in self._sets:
            own = one.share(index, count)
            found.append([])
            for plan in one.plans:
                found[-1] += await answer_problems(self._agent, own, plan, inference, task)
        return found

    def finished(self) -> bool:
        """Whether all answers are there. Raises the exception of a task, and LeaveAgreed as a safe point does."""
        return self._loop.finished(self._tasks)

    def wait(self) -> None:
        """Wait for the answers. Raises LeaveAgreed when a rank is asked to leave."""
        answers = sum(one.answers for one in self._sets)
        self._loop.complete(self._tasks, partial(scoring_progress, self._agent, answers))

    def end(self) -> dict[str, float]:
        """Let all replicas get the newest weights again, and return the metrics of the finished evaluation."""
        self._weights.release()
        lines = self._tasks[0].result() if self._tasks else [[]] * len(self._sets)
        found: dict[str, float] = {}
        for one, its in zip(self._sets, lines, strict=True):
            found |= set_metrics(self._agent, one, its, self._control)
        self.step, self._tasks = None, []
        return found

    def stop(self) -> None:
        """Give up the answers, because the ranks leave. `step` stays: the checkpoint says what is to be repeated."""
        self._loop.cancel(self._tasks)
