"""The only place that takes locks: a flock, which the kernel releases however its holder ends.

Some file systems are mounted without flock. A lock there keeps nobody out, and `Lock.works` is False: callers then
identify the owner by job.json or the text of the lock file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

from launcher.host.process.processes import start_time
from megatron_rl.contract.files import open_regular
from megatron_rl.contract.records import Unreadable, decode, encode_line
from megatron_rl.contract.run_records import LockOwner

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
LOOK_S = 0.05  # seconds between tries


class IsLocked(Exception):
    """Another process holds the lock."""


class Lock:
    """A locked file, held until `release`, or until this process and all that inherited `descriptor` have ended.

    The file is never removed: a second file of the same name would be a second lock.
    """

    def __init__(self, path: Path, patience: float = 0.0) -> None:
        """Take the lock, waiting `patience` seconds for the present holder. Raises IsLocked, and OSError where the file
        cannot be created or opened."""
        self.works = True
        self.descriptor = os.open(str(path), os.O_RDWR | os.O_CREAT, 0o644)
        give_up = time.monotonic() + patience
        try:
            while not self._try():
                if time.monotonic() >= give_up:
                    raise IsLocked(f"{path} is locked")
                time.sleep(LOOK_S)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        os.close(self.descriptor)

    def _try(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self.works = False
        return True


UNKNOWN_OWNER = LockOwner("another process", 0, "an unknown host", "an unknown time")


class RunIsOwned(Exception):
    """Another process holds the run directory. `owner` is its record in the lock file; None: unreadable."""

    def __init__(self, owner: LockOwner | None) -> None:
        self.owner = owner
        what, pid, host, since = owner or UNKNOWN_OWNER
        super().__init__(f"it is in use by {what} (pid {pid or 'unknown'} on {host}, since {since})")


class RunLock(Lock):
    """The right to a run directory, or to one import of an image: a Lock whose file says who holds it."""

    def __init__(self, path: Path, what: str, patience: float = 0.0) -> None:
        """Take the lock, waiting `patience` seconds for a holder who may only be looking. `what` describes this owner
        to others that find the run in use. Raises RunIsOwned, and OSError where the file cannot be created or
        written."""
        try:
            super().__init__(path, patience)
        except IsLocked:
            raise RunIsOwned(_read_owner(path)) from None
        try:
            self._enter(path, what)
        except BaseException:
            self.release()
            raise

    def _enter(self, path: Path, what: str) -> None:
        other = None if self.works else _read_owner(path)
        if other is not None and _runs_on_this_host(other):
            raise RunIsOwned(other)
        ours = LockOwner(what, os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S"))
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, (encode_line(ours) + "\n").encode("utf-8"), 0)


def owner_of(path: Path) -> LockOwner | None:
    if not path.exists():
        return None
    try:
        lock = Lock(path)
    except IsLocked:
        return _read_owner(path) or UNKNOWN_OWNER
    lock.release()
    owner = None if lock.works else _read_owner(path)
    return owner if owner is not None and _runs_on_this_host(owner) else None


def _read_owner(path: Path) -> LockOwner | None:
    with open_regular(path) as file:
        found = decode(LockOwner, file.read(4096), path)
    return None if isinstance(found, Unreadable) else found


def _runs_on_this_host(owner: LockOwner) -> bool:
    return owner.host == socket.gethostname() and owner.pid != os.getpid() and start_time(owner.pid) is not None
