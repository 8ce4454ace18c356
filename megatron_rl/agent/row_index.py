"""File that says where the row of each problem of a large data set begins. It is written once for all processes that
share the cache.

    head       one line: an IndexHead as JSON
    entries    ENTRY.size bytes a problem, set after set

Processes read single entries of it, so it costs them no memory.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from struct import Struct
from typing import NamedTuple, TypeVar

from megatron_rl.contract.records import Unreadable, decode, encode_line
from megatron_rl.contract.shapes import record

logger = logging.getLogger(__name__)

T = TypeVar("T")

ENTRY = Struct("<QIII")
CHUNK = 4096  # entries read together
FIRST_LOOK_S = 0.05
LONGEST_LOOK_S = 5.0
"""Seconds between looks at an index that another process writes, for thousands of processes on a shared disk."""


class IndexEntry(NamedTuple):
    place: int
    """Byte of the data set at which the row's line begins."""
    line: int
    """Number of that line in its file, from 1."""
    size: int
    """Bytes of the prompt; 0 if the model does not see it."""
    check: int
    """CRC-32 of the prompt and of what its verifier needs."""


@record(version=None)
class IndexedSet(NamedTuple):
    name: str
    problems: int
    digest: str  # of the prompts: see ProblemDigest
    longest: int  # bytes of the longest prompt


@record(version=None)
class Note(NamedTuple):
    """A message that was logged while the rows were chosen."""

    level: int
    logger: str
    text: str


@record()
class IndexHead(NamedTuple):
    sets: list[IndexedSet]
    columns: list[str]  # of all rows
    dropped: dict[str, int]  # number of rows that cannot be used, by reason
    lacking: int  # number of rows without what is asked for
    notes: list[Note]


class RowIndex:
    def __init__(self, path: Path) -> None:
        """Open an index. Raises OSError, FileNotFoundError among others, and ValueError if it is not a whole index."""
        self._file = path.open("rb", buffering=0)
        with path.open("rb") as file:
            line = file.readline()
        head = decode(IndexHead, line, path)
        if isinstance(head, Unreadable):
            raise ValueError(head.why)
        self.head = head
        self._start = len(line)
        size = self._start + ENTRY.size * sum(one.problems for one in head.sets)
        if (found := os.fstat(self._file.fileno()).st_size) != size:
            raise ValueError(f"it has {found} bytes instead of {size}")

    def entry(self, number: int) -> IndexEntry:
        return next(self.entries(number, 1))

    def entries(self, first: int, count: int) -> Iterator[IndexEntry]:
        """Yield consecutive entries. Raises OSError."""
        for chunk in range(first, first + count, CHUNK):
            size = ENTRY.size * min(CHUNK, first + count - chunk)
            data = os.pread(self._file.fileno(), size, self._start + ENTRY.size * chunk)
            if len(data) != size:
                raise OSError(errno.EIO, "the index of a data set was cut off", self._file.name)
            yield from map(IndexEntry._make, ENTRY.iter_unpack(data))


def open_index(path: Path) -> RowIndex | None:
    """Return the index in a file; None if it does not exist or cannot be read."""
    try:
        return RowIndex(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("the index %s cannot be read: %s", path, error)
        return None


def write_index(path: Path, head: IndexHead, entries: Iterable[IndexEntry]) -> bool:
    """Write an index, whole or not at all. Returns whether it was written."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(encode_line(head).encode() + b"\n")
            file.writelines(ENTRY.pack(*entry) for entry in entries)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        logger.warning("a data set is kept in memory, because its index %s cannot be written: %s", path, error)
        with suppress(OSError):
            temporary.unlink()
        return False
    return True


def once(path: Path, limit_s: float, load: Callable[[], T | None], build: Callable[[], T]) -> T:
    """Return what one process builds and others load.

    Args:
        path: of the file that `build` writes.
        limit_s: seconds to wait for another process that builds.
        load: returns None if the file does not exist or cannot be used.
        build: writes the file, and returns the result also if that fails.
    """
    give_up, pause, waits = time.monotonic() + limit_s, FIRST_LOOK_S, False
    while (found := load()) is None:
        with _turn(path) as ours:
            if ours:
                return build() if (found := load()) is None else found  # another one may have written it meanwhile
        if time.monotonic() >= give_up:
            logger.warning("%s was not written by another process within %.0f s: not used", path, limit_s)
            return build()
        if not waits:
            logger.info("waiting at most %.0f s for the process that writes %s", limit_s, path)
            waits = True
        time.sleep(pause)
        pause = min(LONGEST_LOOK_S, 1.5 * pause)
    return found


@contextmanager
def _turn(path: Path) -> Iterator[bool]:
    """Yield whether this process may build the file. Where locks do not work, each may: the last file counts."""
    with ExitStack() as opened:
        ours = True
        try:
            descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            ours = False
        except OSError as error:
            logger.warning("no lock for %s: %s", path, error)
        yield ours


def no_room(folder: Path, size: int) -> str:
    """Return why no file of `size` bytes can be written; empty if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return str(error)
    if not os.access(folder, os.W_OK):
        return "it cannot be written"
    return "" if free >= size else f"{free / 2**20:,.0f} MiB are free, {size / 2**20:,.0f} may be needed"


class _Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.notes: list[Note] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.notes.append(Note(record.levelno, record.name, record.getMessage()))


@contextmanager
def noted() -> Iterator[list[Note]]:
    """Collect what mrl logs."""
    handler = _Notes()
    logging.getLogger("megatron_rl").addHandler(handler)
    try:
        yield handler.notes
    finally:
        logging.getLogger("megatron_rl").removeHandler(handler)
