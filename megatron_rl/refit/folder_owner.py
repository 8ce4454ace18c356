"""Ownership of a folder of served weights: two runs that write to one folder would give a server each other's weights.

FOLDER/owner.json holds the identity of a run (`RunIdentity`). The run keeps it while it is preempted, restarted or
waiting, until it has finished. The attempt that writes also holds a flock on the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, decode, encode, read_or_raise
from megatron_rl.contract.run_records import RunIdentity
from megatron_rl.errors import ConfigurationError

OWNER = "owner.json"
PATIENCE_S = 60.0
"""Seconds that an earlier attempt of the same run has to end."""
LOOK_S = 0.1
"""Seconds between two tries to lock the file."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def identity_of(run: RunDir) -> RunIdentity:
    """Identity of a run; its directory where none was recorded."""
    path = run.root.absolute()
    return read_or_raise(RunIdentity, run.identity) or RunIdentity(str(path), str(path), path.stat().st_ino, 0.0)


def claim(folder: Path, ours: RunIdentity, patience: float = PATIENCE_S) -> int:
    """Own the folder, which exists. Returns the descriptor of the lock, which the process keeps open.

    Raises ConfigurationError if another run owns it, and OSError.
    """
    file = folder / OWNER
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        give_up = time.monotonic() + patience
        while not _locks(descriptor):
            owner = _read(descriptor, file)
            if owner is not None and owner.id != ours.id:
                raise ConfigurationError(_refusal(folder, owner, "is running"))
            if time.monotonic() > give_up:
                raise ConfigurationError(f"{folder} is still in use by an earlier attempt of this run: end its ranks")
            time.sleep(LOOK_S)
        owner = _read(descriptor, file)
        if owner is not None and owner.id != ours.id and _may_come_back(owner):
            why = f"has not finished; if it never comes back, delete {file}"
            raise ConfigurationError(_refusal(folder, owner, why))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, encode(ours).encode(), 0)
        os.fsync(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # without locks the identity alone keeps others out
            raise
    return True


def _read(descriptor: int, file: Path) -> RunIdentity | None:
    """Owner in the file; None in a new one. Raises ConfigurationError."""
    content = os.pread(descriptor, 1 << 16, 0)
    if not content:
        return None
    found = decode(RunIdentity, content, file)
    if isinstance(found, Unreadable):
        raise ConfigurationError(f"{found}: delete it if no run writes to this folder")
    return found


def _may_come_back(owner: RunIdentity) -> bool:
    run = RunDir(owner.path)
    return run.root.is_dir() and not run.done.exists()


def _refusal(folder: Path, owner: RunIdentity, why: str) -> str:
    return (
        f"inference.server.folder {folder} belongs to run {Path(owner.path).name} ({owner.path}), which {why}: name "
        "another folder, one for each run"
    )
