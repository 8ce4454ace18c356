"""Folders of one vLLM: short enough for its sockets, and with notes of the shared memory that its processes use."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from megatron_rl.contract.owned_folders import MADE_CHARACTERS, PLACE, note_segments, owned_folder, prefix_of
from megatron_rl.recipe.errors import ConfigurationError

KIND = "vllm"
SOCKET_BYTES = 107
"""Bytes that the kernel takes for the path of a socket."""
SOCKET_NAME_BYTES = 36
"""Bytes of the names that vLLM gives its sockets."""
MOST_BYTES = SOCKET_BYTES - SOCKET_NAME_BYTES - 1
"""Bytes of a folder's path with which its sockets still have valid paths."""
NAMES = ("psm_", "sem.mp-", "vllm_dist_")
"""Beginnings of the names that Python and vLLM give their segments and semaphores."""


def private_folder(*, for_sockets: bool = True) -> AbstractContextManager[Path]:
    """Create a folder that ends with the context, as `owned_folder` does.

    It lies in $TMPDIR; one for sockets lies in $XDG_RUNTIME_DIR or /tmp where that path is too long.

    Raises ConfigurationError if none of these folders can be used, and OSError.
    """
    return owned_folder(KIND, _short_base() if for_sockets else None)


def _short_base() -> Path:
    """The first folder in which sockets of a private folder have valid paths. Raises ConfigurationError."""
    longest = MOST_BYTES - len(f"/{prefix_of(KIND)}") - MADE_CHARACTERS
    temporary = tempfile.gettempdir()
    for base in (temporary, os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"):
        if base and len(os.fsencode(base)) <= longest and os.access(base, os.W_OK | os.X_OK):
            return Path(base)
    raise ConfigurationError(
        f"TMPDIR is {temporary}, and vLLM's sockets need a folder whose path has at most {longest} bytes; neither "
        "XDG_RUNTIME_DIR nor /tmp is one that can be written: set TMPDIR to a folder with a shorter path"
    )


def note_shared_memory(folder: Path, processes: Iterable[int]) -> None:
    """Note all segments that processes use in their folder. Raises OSError.

    processes: process ids.
    """
    mapped = {inode for process in processes for inode in _mapped(process)}
    with os.scandir(PLACE) as files:
        note_segments(folder, {f.name: f.inode() for f in files if f.name.startswith(NAMES) and f.inode() in mapped})


def _mapped(process: int) -> set[int]:
    """Inodes of the segments that a process uses. The C library maps a semaphore under another name before it gives it
    that which others open."""
    try:
        lines = Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()  # it has ended
    return {int(line.split()[4]) for line in lines if PLACE in line}
