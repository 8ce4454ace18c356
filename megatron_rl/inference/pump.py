"""Whichever asyncio loop asks an engine drives it until nothing is left to do."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Driven(Protocol):
    """What is driven."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        ...

    def step(self) -> None: ...

    def deliver(self) -> None:
        """Tell who waits what is known by now."""
        ...

    def fail(self, error: Exception) -> None:
        """Tell all who wait that a step has failed."""
        ...


class Pump:
    """Drives one engine. No loop owns it: that of one phase may have ended with work undone."""

    def __init__(self, engine: Driven) -> None:
        self._engine = engine
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Have the running loop drive the engine, if it does not yet."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._work())

    async def _work(self) -> None:
        self._engine.deliver()  # what was known to its end
        while self._engine.busy:
            await asyncio.sleep(0)
            try:
                self._engine.step()
            except Exception as error:  # noqa: BLE001 - nobody awaits this task: each caller raises it
                self._engine.fail(error)
                return
            self._engine.deliver()
