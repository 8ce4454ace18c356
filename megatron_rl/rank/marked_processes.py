"""Processes that one child of this process has started, which are found and ended with it."""

from __future__ import annotations

from contextlib import suppress
from uuid import uuid4

import psutil

from megatron_rl.contract.children import adopt_orphans

VARIABLE = "MRL_MARK"


class MarkedProcesses:
    """A child and all its descendants, also those whose parent has ended: an environment variable marks them."""

    def __init__(self) -> None:
        adopt_orphans()
        self._mark = uuid4().hex

    @property
    def environment(self) -> dict[str, str]:
        """Variable that the child must be started with."""
        return {VARIABLE: self._mark}

    def living(self) -> list[psutil.Process]:
        found = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.environ().get(VARIABLE) == self._mark:
                    found.append(process)
        return found

    def kill(self) -> None:
        for process in self.living():
            with suppress(psutil.Error):
                process.kill()
