"""The two ends of a JSON-lines file, read without the lines between them."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from typing import BinaryIO, Callable, TypeVar

from megatron_rl.contract.files import AnyPath, again_if_stale, open_regular
from megatron_rl.contract.records import Unreadable, decode_lines, patiently

T = TypeVar("T")

BLOCK = 1 << 16  # bytes that are read at a time


def read_ends(
    kind: type[T], path: AnyPath, first: Callable[[T], bool], last: Callable[[T], bool]
) -> list[T] | Unreadable:
    """Read lines from the start of a file up to one that is `first`, and those from the newest one that is `last` on.

    Returns all lines between them too where no line is `last`; each line once, oldest first; none without a file. Lines
    that are not records are left out.
    """

    def read() -> list[T]:
        with open_regular(path) as file:
            head, at = _first(kind, file, first)
            return [*head, *_last(kind, file, at, last)]

    return patiently(path, lambda: again_if_stale(read), [], patience=0.0)


def parts_from_end(file: BinaryIO, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines between two offsets in parts, the last part first: its offset, where a line begins, and its
    bytes. Raises OSError if the file is shorter."""
    at, rest = end, b""
    while at > begin:
        size = min(BLOCK, at - begin)
        at -= size
        data = read_exactly(file, at, size) + rest
        start = data.find(b"\n") + 1 if at > begin else 0
        rest, part = data[:start], data[start:]  # a line that begins further ahead ends in `rest`
        if at > begin and not start:
            rest, part = data, b""
        if part:
            yield at + start, part


def last_lines(file: BinaryIO, end: int, count: int) -> list[bytes]:
    """Return the last `count` lines before an offset, with their line breaks, or all of them. Raises OSError."""
    lines: list[bytes] = []
    for _, part in parts_from_end(file, 0, end):
        lines = [*io.BytesIO(part), *lines]
        if len(lines) >= count:
            break
    return lines[-count:]


def read_exactly(file: BinaryIO, at: int, size: int) -> bytes:
    """Read bytes that a file has had. Raises OSError, as for a replaced file, if it was cut meanwhile."""
    file.seek(at)
    data = file.read(size)
    if len(data) < size:
        raise OSError(errno.ESTALE, "was cut while it was read")
    return data


def _first(kind: type[T], file: BinaryIO, enough: Callable[[T], bool]) -> tuple[list[T], int]:
    """Return the lines of the first block up to one that is `enough`, and the offset after the last of them."""
    found: list[T] = []
    at = 0
    for line in file.read(BLOCK).split(b"\n")[:-1]:
        records = decode_lines(kind, line).records
        found += records
        at += len(line) + 1
        if records and enough(records[0]):
            break
    return found, at


def _last(kind: type[T], file: BinaryIO, begin: int, enough: Callable[[T], bool]) -> list[T]:
    """Return the newest lines after `begin`, back to one that is `enough`; all if none is."""
    parts: list[list[T]] = []
    for _, part in parts_from_end(file, begin, file.seek(0, os.SEEK_END)):
        lines = decode_lines(kind, part).records
        place = next((place for place in reversed(range(len(lines))) if enough(lines[place])), None)
        parts.append(lines[place or 0 :])
        if place is not None:
            break
    return [line for lines in reversed(parts) for line in lines]
