"""One owner of a run directory at a time: a flock that the kernel releases however its holder ends."""

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Dict, Optional


class RunIsOwned(Exception):
    """Another process holds the run directory. `owner` is what it wrote about itself."""

    def __init__(self, owner: Dict[str, Any]) -> None:
        self.owner = owner
        super().__init__(
            "it is in use by {} (pid {} on {}, since {})".format(
                owner.get("what", "another process"),
                owner.get("pid", "unknown"),
                owner.get("host", "an unknown host"),
                owner.get("since", "an unknown time"),
            )
        )


class RunLock:
    """Held from construction until `release` or the end of the process.

    The file is never removed: a second file of the same name would be a second lock.
    """

    def __init__(self, path: Path, what: str, patience: float = 0.0) -> None:
        """
        Args:
            path: the lock file, made if missing.
            what: the owner in words, shown to whoever finds the run in use.
            patience: seconds to wait for the present holder, who may only be having a look.

        Raises:
            RunIsOwned: it was still held after that time.
        """
        self._fd = os.open(str(path), os.O_RDWR | os.O_CREAT, 0o644)
        give_up = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    owner = _read_owner(self._fd)
                    os.close(self._fd)
                    raise RunIsOwned(owner) from None
                time.sleep(0.05)
        owner = {
            "what": what,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, (json.dumps(owner) + "\n").encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


def owner_of(path: Path) -> Optional[Dict[str, Any]]:
    """What the present owner wrote about itself; None when nobody holds the run."""
    try:
        fd = os.open(str(path), os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _read_owner(fd)
    finally:
        os.close(fd)


def _read_owner(fd: int) -> Dict[str, Any]:
    text = os.pread(fd, 4096, 0).decode("utf-8", "replace")
    try:
        owner = json.loads(text)
    except ValueError:
        return {}  # read between its truncation and its writing
    return owner if isinstance(owner, dict) else {}
