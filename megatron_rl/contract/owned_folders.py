"""Temporary folders that end with the process which made them, or the last one which shares them, also if it is killed:
the next process that makes or sweeps such folders on the host removes those of ended owners.

An owner holds a lock on its folder, which the kernel undoes when the owner ends. Segments of shared memory, which stay
behind when all processes that use them are killed, may be noted in the folder, and are removed with it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import tempfile
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

PLACE = "/dev/shm/"
NOTE = "shared-memory.json"
"""File in a folder: name of each segment of shared memory -> its inode."""
MADE_CHARACTERS = 8
"""Characters that mkdtemp adds to a prefix."""


class OwnedFolder:
    """A new folder that only this user can enter, locked until it is closed or this process ends."""

    def __init__(self, kind: str, base: Path | None = None) -> None:
        """kind: a word of the folder's name. base: default $TMPDIR. Raises OSError."""
        base = base or Path(tempfile.gettempdir())
        remove_ownerless(base)
        self.path, self._lock = _locked_folder(base, prefix_of(kind))

    def is_gone(self) -> bool:
        """Return whether somebody has removed it, such as a cleaner of temporary files."""
        with suppress(OSError):
            return not self.path.exists()
        return False

    def close(self) -> None:
        """Remove the folder and the shared memory that is noted in it."""
        _remove(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextmanager
def owned_folder(kind: str, base: Path | None = None) -> Iterator[Path]:
    """Create a folder that ends with the context. Arguments and errors as of OwnedFolder."""
    folder = OwnedFolder(kind, base)
    try:
        yield folder.path
    finally:
        folder.close()


@contextmanager
def shared_folder(name: str) -> Iterator[Path]:
    """Create a folder in $TMPDIR, or enter it if another process of this user has created it on this host. It ends with
    the last of their contexts. If another user was first to take the name, the folder is this process's alone.

    Raises OSError.
    """
    base = Path(tempfile.gettempdir())
    remove_ownerless(base)
    folder = base / f"mrl-{_host()}-{name}"
    try:
        lock = _lock_shared(folder)
    except OSError:  # also a file system without locks of folders
        lock = None
    if lock is None:
        with owned_folder(name, base) as own:
            yield own
        return
    try:
        yield folder
    finally:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
        except BlockingIOError:
            pass  # another process uses it
        finally:
            os.close(lock)


def prefix_of(kind: str) -> str:
    """Return the beginning of the names of a kind. It names the host, because a lock may hold on one only."""
    return f"mrl-{_host()}-{kind}-"


def remove_ownerless(base: Path | None = None) -> None:
    """Remove this user's folders of this host whose owners have ended, of all kinds. base: default $TMPDIR. What cannot
    be looked at now stays for the next one who calls this."""
    found: list[Path] = []
    with suppress(OSError):
        found += (base or Path(tempfile.gettempdir())).glob(f"mrl-{_host()}-*")
    for folder in found:
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # gone, no folder, or of another user
        try:
            facts = os.fstat(lock)
            if facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) == 0o700:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
        except OSError:
            continue  # its owner lives
        finally:
            os.close(lock)


def note_segments(folder: Path, segments: Mapping[str, int]) -> None:
    """Note segments in a folder, in addition to those noted before. Raises OSError.

    segments: name -> inode.
    """
    before = _noted(folder)
    found = {**before, **segments}
    if found != before:
        temporary = folder / f"{NOTE}.new"
        temporary.write_text(json.dumps(found), encoding="ascii")
        temporary.rename(folder / NOTE)


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _locked_folder(base: Path, prefix: str) -> tuple[Path, int | None]:
    """Create a folder and lock it. The lock is None on file systems without locks of folders, where nobody removes it
    either."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # somebody has removed it, which no lock has kept so far
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


def _lock_shared(folder: Path) -> int:
    """Create a folder unless it exists, and share its lock. Raises OSError: it belongs to another user."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # somebody has removed it, which no lock has kept so far
        try:
            facts = os.fstat(lock)
            if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) != 0o700:
                raise PermissionError(errno.EPERM, "belongs to another user, or others may write into it", str(folder))
            fcntl.flock(lock, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(facts, folder.lstat()):  # nobody has removed it before it was locked
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _remove(folder: Path) -> None:
    for name, inode in _noted(folder).items():
        with suppress(OSError):
            segment = Path(PLACE + name)
            found = segment.stat()
            if (found.st_ino, found.st_uid) == (inode, os.geteuid()):  # not what somebody has made under its name since
                segment.unlink()
    # If this process is killed meanwhile, nobody must take what is left for the folder.
    with suppress(OSError):
        folder = folder.rename(folder.with_name(f"mrl-{_host()}-removed-{uuid.uuid4().hex}"))
    delete(folder)


def delete(folder: Path) -> None:
    """Delete a folder, in which directories, also itself, may be read-only. What cannot be deleted stays."""
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.is_dir():
        return
    with suppress(OSError):
        folder.chmod(0o700)
    for parent, names, _ in os.walk(folder):
        for each in (Path(parent, name) for name in names):
            with suppress(OSError):
                if not each.is_symlink():
                    each.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _noted(folder: Path) -> dict[str, int]:
    try:
        found = json.loads((folder / NOTE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
