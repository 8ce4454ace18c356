"""Records that a decision needs. What is there and cannot be read is neither absent nor believed."""

import sys
from pathlib import Path
from typing import Optional, Type, TypeVar

from megatron_rl.contract.records import ABSENT, Unreadable, read

PATIENCE_S = 5.0  # a stale mount, somebody's editor

T = TypeVar("T")


class UnreadableRecord(OSError):
    """A file of the run cannot be read, or holds something else than its record."""


def find(kind: Type[T], path: Path, patience: float = PATIENCE_S) -> Optional[T]:
    """The record in a file; None where there is no such file. Raises UnreadableRecord.

    Args:
        patience: seconds for which a file that cannot be read is looked at again.
    """
    found = read(kind, path, patience)
    if isinstance(found, Unreadable):
        raise UnreadableRecord(str(found))
    return None if found is ABSENT else found


def find_or_complain(kind: Type[T], path: Path, patience: float = PATIENCE_S) -> Optional[T]:
    """The record in a file; None, with a word in the log, where what it says would only help."""
    try:
        return find(kind, path, patience)
    except UnreadableRecord as error:
        print(error, file=sys.stderr)
        return None
