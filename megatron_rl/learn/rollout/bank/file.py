"""Files of the durable bank: a sequence of records with checksums, written in the background.

    prefix   magic, length of the head, length of the body, CRC-32 of the body, CRC-32 of prefix and head
    head     description of the record, in JSON
    body     arrays and text

A file has one writer and only grows, until a compacted file replaces it. A record whose head is damaged or torn ends a
file: what follows is generated again. Bodies stay on disk until they are needed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import struct
import uuid
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_rl.learn.rollout.encoding import Head

logger = logging.getLogger(__name__)

_MAGIC = b"mrlB"
_PREFIX = struct.Struct("<4sIQII")
_LONGEST_HEAD = 1 << 26  # bytes

Record = tuple[Head, bytes]


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

    def read(self) -> bytes | None:
        with self.path.open("rb") as file:
            file.seek(self.body_start)
            body = file.read(self.body_bytes)
        return body if len(body) == self.body_bytes and zlib.crc32(body) == self.body_crc else None


def encode(head: Head, body: bytes) -> bytes:
    text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
    prefix = _PREFIX.pack(_MAGIC, len(text), len(body), zlib.crc32(body), 0)[:-4]
    return b"".join((prefix, struct.pack("<I", zlib.crc32(text, zlib.crc32(prefix))), text, body))


def bank_file(folder: Path, attempt: int, driver: int) -> Path:
    return folder / f"attempt-{attempt:03d}.driver-{driver:05d}.bank"


def bank_files(folder: Path) -> list[Path]:
    found = folder.glob("attempt-*.driver-*.bank") if folder.is_dir() else []
    return sorted(found, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


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
        for all of them, then delete the `superseded` files, in the background."""
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
                for entry in kept:
                    frame = _frame(entry)
                    if frame is None:
                        continue
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


def _frame(entry: Entry) -> bytes | None:
    with suppress(OSError), entry.path.open("rb") as file:
        file.seek(entry.start)
        frame = file.read(entry.end - entry.start)
        if len(frame) == entry.end - entry.start:
            return frame
    return None
