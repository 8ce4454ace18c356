"""Limits of a child process, and how it ended.

No dataclasses: every program imports this module, and dataclasses would dominate its start time.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any, NamedTuple


class ProcessLimits(NamedTuple):
    """Limits of one child process. No child may use the network, write files or start processes: see confine.py."""

    wall_s: float
    cpu_s: int
    memory_bytes: int
    output_bytes: int = 2**24
    """Largest answer, in bytes; a longer one is not read."""

    @classmethod
    def of(cls, timeout_s: float, memory_gib: float) -> ProcessLimits:
        return cls(timeout_s, math.ceil(timeout_s), int(memory_gib * 2**30))


class Ending(StrEnum):
    OK = "ok"
    WRONG_FORMAT = "wrong format"
    """The answer violates the protocol or is too long."""
    TIME_OUT = "time-out"
    CPU_LIMIT = "processor time"
    """A worker used up its processor time, which other load on the machine does not shorten."""
    MEMORY_LIMIT = "memory"
    KILLED = "killed"
    """The child was killed by something other than its own doing, such as the kernel's out-of-memory killer, or could
    not be started."""
    ERROR = "error"


class ProcessResult(NamedTuple):
    ending: Ending
    value: Any = None
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.ending}: {self.detail}" if self.detail else str(self.ending)
