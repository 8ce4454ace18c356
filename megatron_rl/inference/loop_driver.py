"""Running an engine in the asyncio loop of its caller."""

from __future__ import annotations

import asyncio
from typing import Protocol


class DrivenEngine(Protocol):
    """An engine whose steps an asyncio loop runs."""

    @property
    def busy(self) -> bool: ...

    def step(self) -> None: ...

    def deliver(self) -> None:
        """Pass finished answers to their callers."""
        ...

    def fail(self, error: Exception) -> None:
        """Raise the error of a step in all callers."""
        ...


class LoopDriver:
    """Runs the steps of one engine in the asyncio loop of its caller. That loop may change: the loop of an earlier
    phase may have ended with unfinished work."""

    def __init__(self, engine: DrivenEngine) -> None:
        self._engine = engine
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start stepping in the running loop, unless it already does."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._work())

    async def _work(self) -> None:
        self._engine.deliver()  # answers that the known tokens complete
        while self._engine.busy:
            await asyncio.sleep(0)
            try:
                self._engine.step()
            except Exception as error:  # noqa: BLE001 - nobody awaits this task: each caller raises the error
                self._engine.fail(error)
                return
            self._engine.deliver()
