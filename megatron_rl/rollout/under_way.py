"""The prompts of one driver that are being answered, or are answered and wait for their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, suppress

from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.inference.api import ResumableInference
from megatron_rl.rollout.answering import Answering
from megatron_rl.rollout.bank.bank import Bank
from megatron_rl.rollout.bank.recording import Recording
from megatron_rl.rollout.window import State

Answer = asyncio.Task[TrajectoryGroup | None]
"""None where the prompt is too long."""


class UnderWay:
    """All of it is for the agents' loop. Functions that are not coroutines need it not to run."""

    def __init__(
        self, answering: Answering, inference: ResumableInference, bank: Bank, owns: Callable[[int], bool]
    ) -> None:
        """owns: whether an ordinal is this driver's."""
        self.owns = owns
        self._answering, self._inference, self._bank = answering, inference, bank
        self._tasks: dict[int, Answer] = {}
        self._begun: dict[int, int] = {}  # ordinal: step of the weights when it was begun
        self._finished: dict[int, State] = {}
        self._below = 0  # all owned ordinals below it were begun
        self._news = asyncio.Event()
        self._recorded = AsyncExitStack()
        self._recording: Recording | None = None

    async def start(self) -> None:
        """Before all else."""
        self._recording = await self._recorded.enter_async_context(self._bank.recording(self._inference))

    def begin(self, loop: asyncio.AbstractEventLoop, first: int, below: int, step: int) -> None:
        """Begin the owned ordinals of [first, below) that were not begun before.

        step: after which the weights are that answer them.
        """
        assert self._recording is not None
        new = [ordinal for ordinal in range(max(first, self._below), below) if self.owns(ordinal)]
        self._below = max(self._below, below)
        scored = self._bank.scored(new, self._answering.stream.problem) if new else {}
        for ordinal in new:
            self._begun[ordinal] = step
            task = self._tasks[ordinal] = loop.create_task(self._answer(ordinal, scored.get(ordinal)))
            task.add_done_callback(lambda _: self._news.set())

    async def _answer(self, ordinal: int, scored: TrajectoryGroup | None) -> TrajectoryGroup | None:
        assert self._recording is not None
        return scored or await self._answering.group(ordinal, self._recording)

    def states(self, ordinals: range, dynamic: bool, overdue_since: int | None) -> dict[int, State]:
        """Of those of these ordinals that are owned. Raises what an agent has raised.

        Args:
            dynamic: whether a group without signal is told apart.
            overdue_since: what was begun by weights after that step, or by older ones, and is not finished, is overdue;
                None: nothing is.
        """
        return {
            ordinal: self._state(ordinal, task, dynamic, overdue_since)
            for ordinal, task in self._tasks.items()
            if ordinal in ordinals
        }

    def _state(self, ordinal: int, task: Answer, dynamic: bool, overdue_since: int | None) -> State:
        if not task.done():
            overdue = overdue_since is not None and self._begun[ordinal] <= overdue_since
            return State.OVERDUE if overdue else State.UNFINISHED
        if ordinal not in self._finished:
            self._finished[ordinal] = self._answering.state(task.result(), dynamic)
        return self._finished[ordinal]

    async def wait(self, ordinals: range, seconds: float) -> bool:
        """Until the owned ones of them are finished, or so long. Returns whether there was anything to wait for."""
        waited = False
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(not task.done() for ordinal, task in self._tasks.items() if ordinal in ordinals):
                    waited = True
                    self._news.clear()
                    await self._news.wait()
        return waited

    def take(self, ordinals: Iterable[int]) -> dict[int, TrajectoryGroup]:
        """The finished groups of those of these ordinals that are owned."""
        groups = {ordinal: self._tasks[ordinal].result() for ordinal in ordinals if ordinal in self._tasks}
        return {ordinal: group for ordinal, group in groups.items() if group is not None}

    def settle(self, below: int) -> int:
        """Forget all ordinals below, and give those up that are not finished. Returns how many tokens these had."""
        assert self._recording is not None
        gone = [ordinal for ordinal in self._tasks if ordinal < below]
        unfinished = {ordinal for ordinal in gone if not self._tasks[ordinal].done()}
        tokens = self._recording.tokens_of(unfinished) if unfinished else 0
        self._recording.forget(gone)
        for ordinal in gone:
            del self._begun[ordinal]
            self._finished.pop(ordinal, None)
            task = self._tasks.pop(ordinal)
            task.cancel()  # nothing where it is finished
        return tokens

    async def stop(self) -> None:
        """Record what there is, and end all."""
        await self._recorded.aclose()  # first: what is cancelled has no tokens any more
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
