"""Files of the durable bank: a sequence of records with checksums, written in the background.

    prefix   magic, length of the head, length of the body, CRC-32 of the body, CRC-32 of prefix and head
    head     description of the record, in JSON
    body     arrays and text

A file has one writer and only grows, until a compacted file replaces it. A record whose head is damaged or torn ends a
file: what follows is generated again. Bodies stay on disk until they are needed. What cannot be read is tried again for
READ_PATIENCE_S, and is never taken for absent.
"""

from __future__ import annotations

import json
import logging
import os
import re
import struct
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from megatron_rl.contract.files import names_in
from megatron_rl.contract.records import Unreadable, patiently
from megatron_rl.learn.rollout.encoding import Head

logger = logging.getLogger(__name__)

_MAGIC = b"mrlB"
_PREFIX = struct.Struct("<4sIQII")
_LONGEST_HEAD = 1 << 26  # bytes
_NAME = re.compile(r"attempt-(\d+)\.driver-(\d+)\.bank")
READ_PATIENCE_S = 30.0  # seconds to retry what cannot be read, for example on a stale mount
LOOK_AGAIN_S = 1.0  # seconds between two looks at what is damaged or gone

Record = tuple[Head, bytes]
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Entry:
    path: Path
    start: int
    body_start: int
    body_bytes: int
    body_crc: int
    head: Head

    @property
    def end(self) -> int:
        return self.body_start + self.body_bytes

    def read(self, patience: float = READ_PATIENCE_S) -> bytes | None:
        """Return the body; None if it is damaged, or no longer there. Raises OSError: it cannot be read."""
        frame = self.read_frame(patience)
        return None if frame is None else frame[self.body_start - self.start :]

    def read_frame(self, patience: float = READ_PATIENCE_S) -> bytes | None:
        """Return the whole record. Results as for `read`."""
        return _patiently(self.path, self._look, patience)

    def _look(self) -> bytes | None:
        with self.path.open("rb") as file:
            file.seek(self.start)
            frame = file.read(self.end - self.start)
        entry = _entry_at(self.path, BytesIO(frame), 0, len(frame))
        whole = entry is not None and entry.end == len(frame) and zlib.crc32(frame[entry.body_start :]) == self.body_crc
        return frame if whole else None


def encode(head: Head, body: bytes) -> bytes:
    text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
    prefix = _PREFIX.pack(_MAGIC, len(text), len(body), zlib.crc32(body), 0)[:-4]
    return b"".join((prefix, struct.pack("<I", zlib.crc32(text, zlib.crc32(prefix))), text, body))


def bank_file(folder: Path, attempt: int, driver: int) -> Path:
    return folder / f"attempt-{attempt:03d}.driver-{driver:05d}.bank"


def bank_files(folder: Path) -> list[Path]:
    """Return the files in a folder, oldest attempt first. Raises OSError."""
    found = _patiently(folder, lambda: [match for name in names_in(folder) if (match := _NAME.fullmatch(name))]) or []
    return [folder / match[0] for match in sorted(found, key=lambda match: (int(match[1]), int(match[2])))]


def scan_all(folder: Path) -> dict[Path, tuple[list[Entry], bool]]:
    """Scan the files in a folder. Those that are deleted meanwhile are left out: their records are in another one now.
    Raises OSError: a file cannot be read, and may have records that no other has."""
    found = _scan_each(folder)
    if any(one is None or one[1] for one in found.values()):
        pause()
        found = _scan_each(folder)
    return {path: one for path, one in found.items() if one is not None}


def _scan_each(folder: Path) -> dict[Path, tuple[list[Entry], bool] | None]:
    return {path: _patiently(path, partial(scan, path)) for path in bank_files(folder)}


def _patiently(path: Path, look: Callable[[], Found], patience: float = READ_PATIENCE_S) -> Found | None:
    """Return what `look` finds in a file; None if it is gone. Raises OSError if it cannot be read."""
    found = patiently(path, look, None, patience)
    if isinstance(found, Unreadable):
        raise OSError(
            f"{path} cannot be read, and may have answers that the run needs: {found.why}. Restore it, or remove it to "
            "have its answers generated again"
        )
    return found


def pause() -> None:
    """Wait before a second look at what is damaged or gone: a file system may show garbage for a moment."""
    time.sleep(LOOK_AGAIN_S)


def scan(path: Path) -> tuple[list[Entry], bool]:
    """Return the records of a file, whose bodies are not read, and whether it has more than them, such as a torn tail.
    Raises OSError."""
    entries: list[Entry] = []
    with path.open("rb") as file:
        size, position = file.seek(0, os.SEEK_END), 0
        while position < size and (entry := _entry_at(path, file, position, size)):
            entries.append(entry)
            position = entry.end
    return entries, position < size


def _entry_at(path: Path, file: BinaryIO, position: int, size: int) -> Entry | None:
    """Return the record that begins at `position`; None if none does."""
    file.seek(position)
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        return None
    magic, head_bytes, body_bytes, body_crc, head_crc = _PREFIX.unpack(prefix)
    body_start = position + _PREFIX.size + head_bytes
    if magic != _MAGIC or head_bytes > _LONGEST_HEAD or body_start + body_bytes > size:
        return None
    text = file.read(head_bytes)
    if zlib.crc32(text, zlib.crc32(prefix[:-4])) != head_crc:
        return None
    return Entry(path, position, body_start, body_bytes, body_crc, json.loads(text))


class BankFile:
    """The one file that this driver writes in this attempt, in its own thread.

    A full or failing disk costs a warning and the unwritten records, never the run. After a failure, only `secure` and
    `compact` try to write again.
    """

    def __init__(self, path: Path, limit: int, within: Callable[[Sequence[Entry], int], list[Entry]]) -> None:
        """
        Args:
            limit: largest size of the file, in bytes.
            within: returns the records to keep of those in a file that has become too large, given a limit in bytes.
        """
        self.path = path
        self._limit = limit
        self._within = within
        self._entries: list[Entry] = []
        self._size = 0
        self._failed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bank")
        self._last: Future[None] | None = None

    def append(self, records: Iterable[Record]) -> None:
        """Write and fsync these records, which may be lazy, in the background."""
        self._submit(self._append, records)

    def secure(self, missing: Callable[[Sequence[Entry]], Iterable[Record]]) -> Future[None]:
        """Write the records that `missing` returns for those in the file, however large the file becomes. They are on
        disk when the future is done, which raises OSError if they cannot be written."""
        return self._thread.submit(self._secure, missing)

    def compact(
        self, unsettled: Callable[[Sequence[Entry]], list[Entry]], folded: Sequence[Entry], superseded: Iterable[Path]
    ) -> None:
        """Add the `folded` records of other files to those of this file, keep only the records that `unsettled` returns
        for all of them, then delete the `superseded` files, in the background. If one of the records cannot be read,
        all files stay as they are."""
        self._submit(self._compact, unsettled, list(folded), list(superseded))

    def wait(self, timeout_s: float) -> bool:
        """Wait for all work in the background, at most `timeout_s` seconds. Return whether it is done."""
        try:
            if self._last is not None:
                self._last.result(timeout_s)
        except NotYet:
            return False
        return True

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _submit(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._last is not None and self._last.done():
            self._last.result()  # raises if a record could not be encoded: an error of the caller, not of the disk
        self._last = self._thread.submit(self._guarded, work, *arguments)

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
            self._failed = False
        except OSError as error:
            if not self._failed:
                logger.warning(
                    "%s cannot be written (%s): the run continues, but after a restart it would repeat the generation "
                    "from now on",
                    self.path,
                    error,
                )
            self._failed = True

    def _append(self, lazy: Iterable[Record]) -> None:
        if self._failed:
            raise OSError("an earlier write failed")
        records = [(record, encode(*record)) for record in lazy]
        needed = sum(len(frame) for _, frame in records)
        if self._size + needed > self._limit:
            self._replace(self._within(self._entries, max(0, self._limit - needed)))
        if self._size + needed > self._limit:
            raise OSError(f"resume.bank_gib is used up: finished work has {self._size} of {self._limit} bytes")
        self._write(records)

    def _secure(self, missing: Callable[[Sequence[Entry]], Iterable[Record]]) -> None:
        records = [(record, encode(*record)) for record in missing(self._entries)]
        if records:
            self._write(records)
        self._failed = False

    def _write(self, records: Sequence[tuple[Record, bytes]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            # A failed write may have left the start of a record.
            file.truncate(self._size)
            for _, frame in records:
                file.write(frame)
            file.flush()
            os.fsync(file.fileno())
        position = self._size
        for (head, body), frame in records:
            body_start = position + len(frame) - len(body)
            self._entries.append(Entry(self.path, position, body_start, len(body), zlib.crc32(body), head))
            position += len(frame)
        self._size = position

    def _compact(
        self, unsettled: Callable[[Sequence[Entry]], list[Entry]], folded: list[Entry], superseded: list[Path]
    ) -> None:
        kept = unsettled([*folded, *self._entries])
        if len(kept) < len(self._entries) or folded:
            self._replace(self._within(kept, self._limit))
        for path in superseded:
            path.unlink(missing_ok=True)

    def _replace(self, kept: Sequence[Entry]) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.tmp")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written: list[Entry] = []
        position = 0
        try:
            with temporary.open("wb") as target:
                for entry, frame in _frames(kept):
                    target.write(frame)
                    body_start = position + entry.body_start - entry.start
                    written.append(Entry(self.path, position, body_start, entry.body_bytes, entry.body_crc, entry.head))
                    position += len(frame)
                target.flush()
                os.fsync(target.fileno())
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)
        self._entries, self._size = written, position


def _frames(entries: Sequence[Entry]) -> Iterator[tuple[Entry, bytes]]:
    """Yield the records that two looks do not find damaged or gone. Raises OSError."""
    paused = False
    for entry in entries:
        if (frame := entry.read_frame()) is None:
            if not paused:
                pause()
            paused = True
            frame = entry.read_frame()
        if frame is not None:
            yield entry, frame
