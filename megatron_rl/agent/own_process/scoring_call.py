"""A call of a function that scores answers, and how it ended. Imports nothing slow: the launcher checks recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class UnusableFunction(Exception):
    """The function cannot be imported; the message says why."""


class NotScored(Exception):
    def __init__(
        self,
        reason: str,
        *,
        kind: str = "",
        fault: bool = False,
        wrong: bool = False,
        trace: str = "",
        printed: str = "",
    ) -> None:
        """
        reason: for people, with the line.
        kind: beginning of the reason, the same for all answers with the same fault.
        fault: whether the function itself is wrong, not a server, a limit or memory.
        wrong: whether it returned something that is not a reward.
        trace: traceback.
        printed: what the function printed.
        """
        super().__init__(reason)
        self.kind, self.fault, self.wrong = kind or reason, fault, wrong
        self.trace, self.printed = trace, printed


@dataclass(frozen=True, slots=True)
class Scored:
    value: float | Mapping[str, float]
    printed: str
    """Text that the function printed while it scored this answer and no other."""


@dataclass(frozen=True, slots=True)
class Call:
    positional: Sequence[Any]
    named: Mapping[str, Any]
    timeout_s: float
    """Seconds in the function, for all attempts together."""
    retries: int
