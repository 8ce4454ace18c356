"""Steps of a transfer, in threads beside the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager


class BackgroundSteps:
    """Runs steps one after another while the caller continues. Methods belong to one thread."""

    def __init__(self, beside: Callable[[], AbstractContextManager[None]]) -> None:
        """beside: context of each step, see Platform.beside."""
        self._beside = beside
        self.newest: Future[None] | None = None
        """The step that was begun last; None before the first."""

    def begin(self, step: Callable[[], None]) -> Future[None]:
        """Run a step once the previous one has ended, whatever its result."""
        before, self.newest = self.newest, Future()
        # A thread for each: one that waits for members that are gone must not keep the process from ending.
        threading.Thread(target=self._run, args=(step, before, self.newest), name="weights", daemon=True).start()
        return self.newest

    def _run(self, step: Callable[[], None], before: Future[None] | None, done: Future[None]) -> None:
        if before is not None:
            wait([before])
        try:
            with self._beside():
                step()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)
        else:
            done.set_result(None)
