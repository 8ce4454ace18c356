"""Folders of one vLLM that only this user can enter: short enough for sockets, and locked while their owner lives.

Shared memory of vLLM's processes stays behind when all of them are killed, so it is noted in their folder while they
live, and removed with it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_rl.recipe.errors import ConfigurationError

SOCKET_BYTES = 107
"""Bytes that the kernel takes for the path of a socket."""
SOCKET_NAME_BYTES = 36
"""Bytes of the names that vLLM gives its sockets."""
MOST_BYTES = SOCKET_BYTES - SOCKET_NAME_BYTES - 1
"""Bytes of a folder's path with which its sockets still have valid paths."""
PLACE = "/dev/shm/"
NAMES = ("psm_", "vllm_dist_")
"""Beginnings of the names that Python and vLLM give their segments."""
NOTE = "shared-memory.json"
"""File in the folder of a vLLM: name of each segment -> its inode."""


@contextmanager
def private_folder(*, for_sockets: bool = True) -> Iterator[Path]:
    """Create a folder, which ends with the context, as does the shared memory that is noted in it. Folders whose owners
    were killed are removed on the way.

    It lies in $TMPDIR; one for sockets lies in $XDG_RUNTIME_DIR or /tmp where that path is too long.

    Raises ConfigurationError if none of these folders can be used, and OSError.
    """
    prefix = f"mrl-vllm-{zlib.crc32(socket.gethostname().encode()):08x}-"  # a lock may hold on one host only
    base = _short_base(prefix) if for_sockets else Path(tempfile.gettempdir())
    _remove_ownerless(base, prefix)
    folder, lock = _locked_folder(base, prefix)
    try:
        yield folder
    finally:
        _remove(folder)
        if lock is not None:
            os.close(lock)


def _short_base(prefix: str) -> Path:
    """The first folder in which sockets of a private folder have valid paths. Raises ConfigurationError."""
    longest = MOST_BYTES - len(f"/{prefix}") - 8  # characters that mkdtemp adds
    temporary = tempfile.gettempdir()
    for base in (temporary, os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"):
        if base and len(os.fsencode(base)) <= longest and os.access(base, os.W_OK | os.X_OK):
            return Path(base)
    raise ConfigurationError(
        f"TMPDIR is {temporary}, and vLLM's sockets need a folder whose path has at most {longest} bytes; neither "
        "XDG_RUNTIME_DIR nor /tmp is one that can be written: set TMPDIR to a folder with a shorter path"
    )


def _locked_folder(base: Path, prefix: str) -> tuple[Path, int | None]:
    """Create a folder and lock it, which the kernel undoes when this process ends. The lock is None on file systems
    without locks of folders, where nobody removes it either."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.exists():  # nobody has removed it before it was locked
                return folder, lock
        except BlockingIOError:
            pass  # somebody is removing it
        except OSError:
            os.close(lock)
            return folder, None
        os.close(lock)


def _remove(folder: Path) -> None:
    remove_segments(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_ownerless(base: Path, prefix: str) -> None:
    """Remove this user's folders of this host whose owners have ended."""
    for folder in base.glob(f"{prefix}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # gone, no folder, or of another user
        try:
            found = os.fstat(lock)
            if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
        except OSError:
            continue  # its owner lives
        finally:
            os.close(lock)


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
