"""Files on a shared file system: written whole or not at all, appended line by line, read again if a mount is stale."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pwd
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Callable, TypeVar, Union

from megatron_rl.contract.codes import CACHE_VARIABLE
from megatron_rl.contract.owned_folders import OwnedFolder

T = TypeVar("T")
AnyPath = Union[str, Path]

FULL = (errno.ENOSPC, errno.EDQUOT)  # errno of a full disk or an exhausted quota
PASSING = (
    *FULL,  # a save that fills the disk frees the space when it fails
    errno.EIO,
    errno.ESTALE,
    errno.EAGAIN,
    errno.EBUSY,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ESHUTDOWN,  # of Lustre, after it has evicted this node
    errno.EREMOTEIO,
)
"""Values of errno for which a write is tried again: a shared file system recovers from them."""
WRITE_PATIENCE_S = 30.0  # seconds for which a record that a run needs is tried again

logger = logging.getLogger(__name__)


def write_atomic(path: AnyPath, text: str, durable: bool = True, private: bool = False) -> None:
    """Write `text` so that readers, also after a crash, see either the old file or the whole new one.

    Args:
        durable: whether it must survive a power failure; unnecessary for files that are written every few seconds.
        private: whether only its owner may ever read it.

    Raises:
        OSError: the folder is missing, or the file cannot be written.
    """
    target = Path(path)
    # A process id is unique only on its node, but the nodes share the file system.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        # A private file is so from its creation: who opens it a moment before its mode changes could read it later.
        opener = _created_private if private else None
        with open(str(temporary), "w", encoding="utf-8", opener=opener) as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error counts
            temporary.unlink()
        raise


def make_readable(path: AnyPath) -> None:
    """Give a file the permissions that a new one gets in its folder. Libraries create safetensors under a temporary
    name, readable by their owner alone. Raises OSError."""
    target = Path(path)
    probe = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        probe.touch()
        target.chmod(stat.S_IMODE(probe.stat().st_mode))
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def append_line(path: AnyPath, line: str, durable: bool = False, patience: float = 0.0) -> None:
    """Append one line in a single write, to a file with one writer at a time. A torn last line, left by a crash, is
    terminated first and stays a separate line.

    Raises OSError as `append_bytes` does.

    Args:
        line: without a line break.
        durable: whether it must survive a power failure.
        patience: as for `until_written`.
    """
    _append(path, (line + "\n").encode("utf-8"), durable, b"\n", patience)


def append_bytes(path: AnyPath, data: bytes, patience: float = 0.0) -> None:
    """Append to a file with one writer at a time, in a single write.

    Raises OSError and restores the file, so that the call can be repeated. If the restoration fails too, the data may
    be torn or, if only the flush failed, complete.

    patience: as for `until_written`.
    """
    _append(path, data, False, b"", patience)


def _append(path: AnyPath, data: bytes, durable: bool, after: bytes, patience: float) -> None:
    """Append as `append_bytes` does. after: byte that must come before the data, unless the file is empty."""
    end: int | None = None

    def append() -> None:
        nonlocal data, end
        with Path(path).open("ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if end is None:
                if size and after:
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != after:
                        data = after + data
                end = size
            elif size > end:  # the last try has left a part, or all of it, and could not restore the file
                file.truncate(end)
            left = data
            while left:
                left = left[file.write(left) :]  # one write, unless the disk fills up during it
            if durable:
                os.fsync(file.fileno())

    def append_or_restore() -> None:
        try:
            append()
        except OSError:
            if end is not None:
                with contextlib.suppress(OSError):  # the first error counts
                    os.truncate(path, end)
            raise

    until_written(path, append_or_restore, patience)


def until_written(path: AnyPath, write: Callable[[], T], patience: float = WRITE_PATIENCE_S) -> T:
    """Call `write`, which writes `path`, until it succeeds; return its result.

    Args:
        patience: seconds to try again after errors that pass, such as those of a full disk or a stale mount.

    Raises:
        OSError: with the file and the reason. The errors did not pass, or another one occurred.
    """
    give_up = time.monotonic() + patience
    said: str | None = None
    while True:
        try:
            return write()
        except OSError as error:
            left = give_up - time.monotonic()
            if error.errno is None:
                raise
            if error.errno not in PASSING or left <= 0:
                raise OSError(error.errno, error.strerror, str(path)) from error  # a failed write names no file
            if said != error.strerror:
                said = error.strerror
                logger.warning("%s cannot be written for now: %s", path, said)
        time.sleep(min(1.0, left))


def read_bytes(path: AnyPath) -> bytes:
    """Return the content of a regular file. Raises OSError, also for pipes and devices, which may have no end."""
    return again_if_stale(lambda: _read_bytes(path))


@contextlib.contextmanager
def open_regular(path: AnyPath) -> Iterator[BinaryIO]:
    """Open a regular file for reading. Raises OSError as `read_bytes` does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without O_NONBLOCK, opening a pipe waits for a writer
    except ValueError as error:  # a zero byte, or what no encoding of file names has
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from error
    try:
        _refuse_irregular(os.fstat(descriptor), str(path))
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def check_regular(path: AnyPath) -> None:
    """Raise OSError if `path` is not a regular file or a link to one. For files that a library opens: it would wait for
    ever at a pipe."""
    _refuse_irregular(Path(path).stat(), str(path))


def cache_folder(kind: str) -> Path:
    """Return the folder for caches of a kind, which may not exist yet. MRL_CACHE moves the caches."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mrl"
    return Path(os.environ.get(CACHE_VARIABLE, home)) / kind


def own_temporary_folder(name: str) -> Path:
    """Return a folder among temporary files that this user alone can write, with its number in the name. It is made if
    it does not exist. Raises PermissionError if another user has made it, who could put files there for us to run."""
    folder = Path(tempfile.gettempdir(), f"{name}-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077 or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(errno.EPERM, "belongs to another user, or others may write into it", str(folder))
    return folder


def compiler_cache() -> str:
    """Return the folder for code that torch compiles and loads again. By default it is one in /tmp whose name another
    user can guess, make first, and fill."""
    try:
        return str(own_temporary_folder("mrl-compiled"))
    except OSError:
        return str(OwnedFolder("compiled").path)  # locked until this process ends


@contextlib.contextmanager
def only_owner_writes() -> Iterator[None]:
    """Create files that only their owner can write, in this process and those that it starts.

    Many clusters have the umask 002: in a run directory that a group may read, the group could otherwise replace code
    that runs as the owner. Slurm gives tasks the umask in SLURM_UMASK.
    """
    before = os.umask(0o077)
    mask = before | stat.S_IWGRP | stat.S_IWOTH
    os.umask(mask)
    if "SLURM_UMASK" in os.environ:
        os.environ["SLURM_UMASK"] = f"{mask:04o}"
    try:
        yield
    finally:
        os.umask(before)


def seen(look: Callable[[], bool]) -> bool:
    """Return the result of a look at a path, such as `path.is_file`; False for a name that no file can have or that
    cannot be looked at, which the reader of the path reports."""
    try:
        return look()
    except (OSError, ValueError):
        return False


def names_in(folder: AnyPath) -> list[str]:
    """Return the names in a folder; none if it does not exist, or no folder can have this name. Raises OSError."""
    try:
        return again_if_stale(lambda: [found.name for found in Path(folder).iterdir()])
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return []


def again_if_stale(read: Callable[[], T]) -> T:
    """Read again after ESTALE: another node replaced the file while this one had it open, and its name leads to the new
    one."""
    try:
        return read()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return read()


def owner_name(uid: int) -> str:
    """Name of a user, or its number where the machine has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _created_private(path: str, flags: int) -> int:
    return os.open(path, flags, stat.S_IRUSR | stat.S_IWUSR)


def _read_bytes(path: AnyPath) -> bytes:
    with open_regular(path) as file:
        return file.read()


def _refuse_irregular(found: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", path)
