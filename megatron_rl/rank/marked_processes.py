"""Processes that one child of this process has started, which are found and ended with it."""

from __future__ import annotations

from contextlib import suppress
from uuid import uuid4

import psutil

from megatron_rl.contract.children import adopt_orphans

VARIABLE = "MRL_MARK"


class MarkedProcesses:
    """A child and all its descendants, also those whose parent has ended: an environment variable marks them.

    A process that gives itself another title overwrites its environment, so processes that were seen once, and the
    children of marked ones, count without the mark.
    """

    def __init__(self) -> None:
        adopt_orphans()
        self._mark = uuid4().hex
        self._seen: set[psutil.Process] = set()

    @property
    def environment(self) -> dict[str, str]:
        """Variable that the child must be started with."""
        return {VARIABLE: self._mark}

    def living(self) -> list[psutil.Process]:
        parents = {}
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    parents[process] = process.ppid()
        found = {process for process in parents if process in self._seen or self._is_marked(process)}
        pids = {process.pid for process in found}
        while further := {process for process, parent in parents.items() if parent in pids} - found:
            found |= further
            pids |= {process.pid for process in further}
        self._seen = found
        return list(found)

    def kill(self) -> None:
        for process in self.living():
            with suppress(psutil.Error):
                process.kill()

    def _is_marked(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.environ().get(VARIABLE) == self._mark
        return False
