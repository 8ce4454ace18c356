"""What a child process may use, and how it ended. No dataclasses: every program loads this, and they take longest."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple


class ProcessLimits(NamedTuple):
    """Of one child process. None has a network, writes files or starts processes: see confine.py."""

    wall_s: float
    """Seconds for one answer."""
    cpu_s: int
    """Seconds of processor time for one answer."""
    memory_bytes: int
    """Of address space."""
    output_bytes: int = 2**24
    """Of one answer; what is more is not read."""


class Ending(StrEnum):
    OK = "ok"
    WRONG_FORMAT = "wrong format"
    """It answered, but not as was agreed on, or at more length than it may."""
    TIME_OUT = "time-out"
    KILLED = "killed"
    """By something that is not to be laid to its charge: the kernel, short of memory, or somebody else. Or it could not
    be started."""
    ERROR = "error"
    """It raised, crashed or gave up."""


class ProcessResult(NamedTuple):
    """Of one answer."""

    ending: Ending
    value: Any = None
    """The answer, where it is OK."""
    detail: str = ""
    """What happened, where it is not; for people."""

    def __str__(self) -> str:
        return f"{self.ending}: {self.detail}" if self.detail else str(self.ending)
