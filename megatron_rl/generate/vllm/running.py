"""A vLLM that runs: its figures, its signs of life, and the error that has ended it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from megatron_rl.generate.replica.lifecycle import first_of
from megatron_rl.generate.vllm.client import CONTROL_S, VllmClient, VllmStats
from megatron_rl.generate.vllm.process import VllmClosed, VllmGone, VllmProcess, VllmRefused
from megatron_rl.rank.activity import Activity

LOOK_S = 2.0
SILENT_S = 60.0
"""Seconds after which a vLLM that reports no figures counts as gone."""


class RunningVllm:
    """All methods belong to the loop of the client."""

    def __init__(self, process: VllmProcess, client: VllmClient, activity: Activity, silence_limit_s: float) -> None:
        """silence_limit_s: seconds after which idle workers that do not react count as gone."""
        self.client, self.activity = client, activity
        self.stats = VllmStats()
        self._process, self._silence_limit_s = process, min(CONTROL_S, silence_limit_s)
        self._error: Exception | None = None
        self._failed = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Close the client at the end; vLLM itself is ended by its owner."""
        try:
            yield
        finally:
            await self.client.close()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._failed.set()

    async def watch(self, busy: Callable[[], bool]) -> None:
        """Give signs of life, forever. Raises the first error that ends the replica, with vLLM's own reason.

        busy: whether vLLM has something to do. Its answers are then the signs of life.
        """
        await first_of(self._failed.wait(), self._look(busy))
        assert self._error is not None, "looking has no other end"
        if isinstance(self._error, VllmGone | VllmRefused):
            raise VllmGone(await asyncio.to_thread(self._process.explained, str(self._error))) from self._error
        raise self._error

    async def _look(self, busy: Callable[[], bool]) -> None:
        """Look at vLLM again and again, and notice its end, which no open request may show: a server whose engine has
        died may wait for open requests forever. While it has nothing to do, its workers must react."""
        answered_at = reacted_at = time.monotonic()
        while True:
            try:
                self._process.check()
                self.stats = await self.client.stats()
                answered_at = time.monotonic()
                if not busy():
                    self.activity.beat()
                    await self.client.reach_workers()
                reacted_at = time.monotonic()
            except VllmGone as error:
                now = time.monotonic()
                silent = now - answered_at > SILENT_S or now - reacted_at > self._silence_limit_s
                if silent or isinstance(error, VllmClosed):
                    self.fail(error)
            await asyncio.sleep(LOOK_S)
