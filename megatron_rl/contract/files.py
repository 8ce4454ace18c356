"""Bytes on a shared file system: whole files or none, lines in one write, and reads that a stale mount may delay."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import time
import uuid
from pathlib import Path
from typing import Callable, TypeVar, Union

T = TypeVar("T")
AnyPath = Union[str, Path]

FULL = (errno.ENOSPC, errno.EDQUOT)  # of an OSError: no room on the disk, or none left to this user
ROOM_PATIENCE_S = 30.0  # seconds: a save that fills the disk gives the space back when it fails

logger = logging.getLogger(__name__)


def write_atomic(path: AnyPath, text: str, durable: bool = True, private: bool = False) -> None:
    """Write `text` so that readers and a crash see either the old file or the whole new one. Raises OSError; its folder
    must be there.

    Args:
        durable: whether it must outlive a power failure; what is written every few seconds need not.
        private: whether nobody but its owner may ever read it.
    """
    target = Path(path)
    # A process id is unique on its node only, and the nodes share the file system.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            if private:
                os.fchmod(file.fileno(), stat.S_IRUSR | stat.S_IWUSR)
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error counts
            temporary.unlink()
        raise


def is_temporary(name: str) -> bool:
    """Whether a file of this name is what `write_atomic` left behind when it was cut short."""
    return re.match(r"^\..+\.[0-9a-f]{32}\.tmp$", name) is not None


def append_line(path: AnyPath, line: str, durable: bool = False) -> None:
    """Append one line in a single write, to a file that has one writer at a time. A torn last line, left by a crash, is
    ended first and stays by itself.

    Raises OSError with the file as it was, so that it can be tried again: what a full disk took of the line is taken
    back. Where the file system refuses that too, the line is torn or, if only the flush failed, there.

    Args:
        line: without its line break.
        durable: whether it must outlive a power failure.
    """
    data = (line + "\n").encode("utf-8")
    end: int | None = None
    try:
        with Path(path).open("ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    data = b"\n" + data
            end = size
            while data:
                data = data[file.write(data) :]  # all at once, but for a disk that is full in the middle of it
            if durable:
                os.fsync(file.fileno())
    except OSError:
        if end is not None:
            with contextlib.suppress(OSError):  # the first error counts
                os.truncate(path, end)
        raise


def once_there_is_room(path: AnyPath, write: Callable[[], T], patience: float = ROOM_PATIENCE_S) -> T:
    """What `write`, which writes `path`, returns once it succeeds.

    Args:
        patience: seconds for which a full disk is waited for.

    Raises:
        OSError: the disk stays full, or something else is wrong with it.
    """
    give_up = time.monotonic() + patience
    while True:
        try:
            return write()
        except OSError as error:
            left = give_up - time.monotonic()
            if error.errno not in FULL or left <= 0:
                raise
            logger.warning("%s waits for room: %s", path, error)
        time.sleep(min(1.0, left))


def read_bytes(path: AnyPath) -> bytes:
    """The content of a regular file; a pipe or a device, which may have no end, is refused. Raises OSError."""
    return _again_if_stale(lambda: _read_bytes(str(path)))


def check_regular(path: AnyPath) -> None:
    """For what only a library can open, which would wait at a pipe for ever. Raises OSError where `path` is no regular
    file, nor a link to one."""
    _refuse_irregular(Path(path).stat(), str(path))


def names_in(folder: AnyPath) -> list[str]:
    """The names in a folder; none where there is no such folder. Raises OSError."""
    try:
        return _again_if_stale(lambda: [found.name for found in Path(folder).iterdir()])
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read_bytes(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # or the open of a pipe would wait for its writer
    try:
        _refuse_irregular(os.fstat(descriptor), path)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _refuse_irregular(found: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is no regular file", path)


def _again_if_stale(read: Callable[[], T]) -> T:
    """A file that another node replaced while this one had its handle is found under its name at the second try."""
    try:
        return read()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return read()
