"""A vLLM from its start to its end: its figures, its signs of life, and the error that has ended it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from megatron_rl.generate.replica.lifecycle import first_of
from megatron_rl.generate.vllm.client import CONTROL_S, VllmClient, VllmStats
from megatron_rl.generate.vllm.process import VllmClosed, VllmGone, VllmProcess, VllmRefused
from megatron_rl.generate.vllm.start import VllmStart
from megatron_rl.rank.activity import Activity

LOOK_S = 2.0
SILENT_S = 60.0
"""Seconds after which a vLLM that reports no figures counts as gone."""


class RunningVllm:
    """`end` belongs to the thread that has started it, and all other methods to one asyncio loop."""

    def __init__(self, start: VllmStart, activity: Activity, silence_limit_s: float) -> None:
        """silence_limit_s: seconds after which idle workers that do not react count as gone."""
        self.client, self.activity = VllmClient(start.served.socket), activity
        self.stats = VllmStats()
        self.up = False
        """Whether it has started."""
        self._start, self._silence_limit_s = start, min(CONTROL_S, silence_limit_s)
        self._process: VllmProcess | None = None
        self._occupied = 0  # unfinished calls that occupy its workers
        self._tasks: set[asyncio.Future[None]] = set()
        self._error: Exception | None = None
        self._failed = asyncio.Event()

    async def start(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Start it, and wait until it answers, or need not go on. Raises what `VllmStart` raises."""
        self._process = self._start.begin()
        self.up = await self._start.answers(self._process, goes_on)

    def end(self) -> None:
        if self._process is not None:
            self._process.end()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Close the client at the end, and give up unfinished calls; vLLM itself is ended by its owner."""
        try:
            yield
        finally:
            tasks = [*self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.client.close()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        """Do some work of vLLM. If it does not answer, the replica ends: a server whose engine has died refuses new
        requests."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), VllmGone):
            self.fail(error)

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """A call with a limit occupies its workers, which react to nothing else meanwhile."""
        self._occupied += 1
        try:
            yield
        finally:
            self._occupied -= 1

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._failed.set()

    async def watch(self, busy: Callable[[], bool]) -> None:
        """Give signs of life, forever. Raises the first error that ends the replica, with vLLM's own reason.

        busy: whether vLLM has something to do. Its answers are then the signs of life.
        """
        await first_of(self._failed.wait(), self._look(busy))
        assert self._error is not None, "looking has no other end"
        if self._process is not None and isinstance(self._error, VllmGone | VllmRefused):
            raise VllmGone(await asyncio.to_thread(self._process.explained, str(self._error))) from self._error
        raise self._error

    async def _look(self, busy: Callable[[], bool]) -> None:
        """Look at vLLM again and again, and notice its end, which no open request may show: a server whose engine has
        died may wait for open requests forever. While it has nothing to do, its workers must react. Before its start,
        and during it, there is nothing to look at: what starts it has a limit, and notices its end."""
        answered_at = reacted_at = time.monotonic()
        while True:
            try:
                if self._process is not None and self.up:
                    self._process.check()
                    self.stats = await self.client.stats()
                answered_at = time.monotonic()
                if not (busy() or self._occupied):
                    self.activity.beat()
                    if self.up:
                        await self.client.reach_workers()
                reacted_at = time.monotonic()
            except VllmGone as error:
                now = time.monotonic()
                silent = now - answered_at > SILENT_S or now - reacted_at > self._silence_limit_s
                if silent or isinstance(error, VllmClosed):
                    self.fail(error)
            await asyncio.sleep(LOOK_S)
