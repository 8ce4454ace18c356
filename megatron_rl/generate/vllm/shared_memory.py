"""Shared memory of vLLM's processes, which stays behind when all of them are killed: noted while they live, and removed
by the owner of their folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PLACE = "/dev/shm/"
NAMES = ("psm_", "vllm_dist_")
"""Beginnings of the names that Python and vLLM give their segments."""
NOTE = "shared-memory.json"
"""File in the folder of a vLLM: name of each segment -> its inode."""


def note_segments(folder: Path, processes: Iterable[int]) -> None:
    """Note all segments that processes use, in addition to those noted before. Raises OSError.

    processes: process ids.
    """
    before = _noted(folder)
    found = before | {name: inode for process in processes for name, inode in _segments(process).items()}
    if found != before:
        temporary = folder / f"{NOTE}.new"
        temporary.write_text(json.dumps(found), encoding="ascii")
        temporary.rename(folder / NOTE)


def remove_segments(folder: Path) -> None:
    """Remove the segments that were noted. One that somebody else has created under the same name stays."""
    for name, inode in _noted(folder).items():
        with suppress(OSError):
            segment = Path(PLACE + name)
            found = segment.stat()
            if (found.st_ino, found.st_uid) == (inode, os.geteuid()):
                segment.unlink()


def _segments(process: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}  # it has ended
    found = {}
    for line in lines:
        _, _, name = line.partition(PLACE)
        if name.startswith(NAMES) and not name.endswith("(deleted)"):
            found[name] = int(line.split()[4])
    return found


def _noted(folder: Path) -> dict[str, int]:
    try:
        found: dict[str, int] = json.loads((folder / NOTE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return {}
    return found
