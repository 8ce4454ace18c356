"""Records that a decision needs. What is there and cannot be read is neither absent nor believed."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from megatron_rl.contract.records import ABSENT, Unreadable, read

PATIENCE_S = 5.0  # a stale mount, somebody's editor

T = TypeVar("T")


class UnreadableRecord(OSError):
    """A file of the run cannot be read, or holds something else than its record."""


def read_or_raise(kind: type[T], path: Path) -> T | None:
    """The record in a file; None where there is no such file. Raises UnreadableRecord."""
    found = read(kind, path, PATIENCE_S)
    if isinstance(found, Unreadable):
        raise UnreadableRecord(str(found))
    return None if found is ABSENT else found
