"""Records in files, with readers that never raise.

    found = read(Drain, attempt.drain)
    if found is ABSENT: ...                       the attempt was not asked to leave
    elif isinstance(found, Unreadable): ...       it may have been asked; found.why is the reason
    else: found.deadline

Unreadable files are never treated as absent: the results are different types, so mypy rejects access to the fields of a
record that may be missing. Callers that need no distinction, such as views, say so: `if_readable(found)`.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Callable, Generic, NamedTuple, TypeVar, Union, overload

from megatron_rl.contract.files import AnyPath, append_line, open_regular, read_bytes, until_written, write_atomic
from megatron_rl.contract.shapes import SHAPES, Mismatch, from_json, to_json

T = TypeVar("T")
S = TypeVar("S")

LOOK_S = 0.2  # seconds between looks at a file that is unreadable for now
PATIENCE_S = 5.0  # seconds for which a decision retries reading, for example because of a stale mount


class Absent(Enum):
    ABSENT = "absent"


ABSENT = Absent.ABSENT


class Unreadable(NamedTuple):
    """A file exists, or may exist, but its content cannot be used."""

    path: str
    why: str

    def __str__(self) -> str:
        return f"{self.path} cannot be used: {self.why}"


class Damage(NamedTuple):
    """A line that is not a record: torn, foreign or written by a newer mrl."""

    line: int  # number, from 1
    why: str


@dataclass
class Lines(Generic[T]):
    """Content of a JSON-lines file."""

    records: list[T]  # of the readable lines
    damaged: list[Damage]  # the other lines
    absent: bool = False  # whether the file does not exist


Found = Union[T, Absent, Unreadable]


def read(kind: type[T], path: AnyPath, patience: float = 0.0) -> T | Absent | Unreadable:
    """Read the record in a file.

    patience: seconds for which reading is retried if the file cannot be read, for example because of a stale mount.
    """
    return patiently(path, lambda: decode(kind, read_bytes(path), path), ABSENT, patience)


class UnreadableRecord(OSError):
    """A file of the run cannot be read, or its content is not its record."""


def read_or_raise(kind: type[T], path: AnyPath) -> T | None:
    """Return the record that a decision needs; None if it is absent. Raises UnreadableRecord."""
    found = read(kind, path, PATIENCE_S)
    if isinstance(found, Unreadable):
        raise UnreadableRecord(str(found))
    return if_readable(found)


def if_readable(found: T | Absent | Unreadable) -> T | None:
    """Return the record; None if it is absent or unreadable. For views and optional information: a decision must
    distinguish the two."""
    return None if isinstance(found, (Absent, Unreadable)) else found


def write(path: AnyPath, value: Any, durable: bool = True, patience: float = 0.0) -> None:
    """Write a record to a file, whole or not at all.

    Args:
        durable: whether it must survive a power failure.
        patience: as for `until_written`.

    Raises:
        OSError: the file is unchanged.
        ValueError: a field does not match its type, or a number is not finite.
    """
    text = encode(value)
    until_written(path, lambda: write_atomic(path, text, durable), patience)


def encode(value: Any) -> str:
    return json.dumps(to_json(value), indent=1, sort_keys=True, allow_nan=False) + "\n"


def decode(kind: type[T], data: bytes, path: AnyPath) -> T | Unreadable:
    """Parse the content of a record's file.

    path: of that file, for the message.
    """
    try:
        return from_json(kind, _parse(data))
    except ValueError as error:
        return Unreadable(str(path), str(error))


def append(path: AnyPath, value: Any, durable: bool = False, patience: float = 0.0) -> None:
    """Append a record to a JSON-lines file. Raises OSError, and ValueError as `write` does.

    durable, patience: as for `write`.
    """
    append_line(path, encode_line(value), durable, patience)


def encode_line(value: Any) -> str:
    """Return a record as one line, without a line break. Raises ValueError."""
    return json.dumps(to_json(value), sort_keys=True, allow_nan=False)


@overload
def read_lines(kinds: type[T], path: AnyPath, patience: float = ...) -> Lines[T] | Unreadable: ...
@overload
def read_lines(kinds: tuple[type[T], type[S]], path: AnyPath, patience: float = ...) -> Lines[T | S] | Unreadable: ...
def read_lines(kinds: Any, path: AnyPath, patience: float = 0.0) -> Any:
    """Read the records of a JSON-lines file; none if it does not exist. Unreadable if it cannot be read at all.

    Args:
        kinds: type of the lines, or two types with different events.
        patience: seconds for which reading is retried if the file cannot be read.
    """
    absent: Lines[Any] = Lines([], [], absent=True)
    return patiently(path, lambda: decode_lines(kinds, read_bytes(path)), absent, patience)


@overload
def decode_lines(kinds: type[T], data: bytes) -> Lines[T]: ...
@overload
def decode_lines(kinds: tuple[type[T], type[S]], data: bytes) -> Lines[T | S]: ...
def decode_lines(kinds: Any, data: bytes) -> Any:
    """Parse a part of a JSON-lines file that begins at the start of a line. A last line without a line break counts;
    empty lines do not.

    kinds: as for `read_lines`.
    """
    several = kinds if isinstance(kinds, tuple) else (kinds,)
    found: Lines[Any] = Lines([], [])
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line:
            continue
        try:
            value = _parse(line)
            found.records.append(from_json(_kind_of(several, value), value))
        except ValueError as error:
            found.damaged.append(Damage(number, str(error)))
    return found


class Place(NamedTuple):
    """Place in a JSON-lines file where reading goes on."""

    at: int = 0  # in bytes
    last: bytes = b""  # line that ends there, with its line break


class RecordTail(Generic[T]):
    """Reader of a growing JSON-lines file, each line once; from the beginning again after the file was cut back or
    replaced, as a run that resumes does. Skips lines torn by a full disk, which are written again."""

    def __init__(self, kind: type[T], path: Path, begin: Callable[[], Place] = Place) -> None:
        """begin: returns where to begin; asked again after the file was replaced."""
        self._kind: type[T] = kind
        self._path = path
        self._begin = begin
        self._place: Place | None = None
        self.replaced = 0  # number of times that the file was found replaced
        self.damaged = 0  # lines that are not records
        self.rest = b""  # what follows the last whole line

    def new(self) -> list[T]:
        """Return the new lines; none without a file. Raises OSError."""
        try:
            data = self._unread()
        except (FileNotFoundError, NotADirectoryError):
            return []
        whole = data.rfind(b"\n") + 1
        lines, self.rest = data[:whole], data[whole:]
        assert self._place is not None
        if lines:
            last = lines[lines.rfind(b"\n", 0, -1) + 1 :]
            self._place = Place(self._place.at + whole, last)
        found = decode_lines(self._kind, lines)
        self.damaged += len(found.damaged)
        return found.records

    # A file that was cut back may have grown beyond the place again since the last look. It then has other bytes before
    # the place: lines have times with all their digits.
    def _unread(self) -> bytes:
        while True:
            if self._place is None:
                self._place, self.damaged = self._begin(), 0
            at, last = self._place
            with open_regular(self._path) as file:
                file.seek(at - len(last))
                data = file.read()
            if data.startswith(last):
                return data[len(last) :]
            self._place = None
            self.replaced += 1


def patiently(path: AnyPath, look: Callable[[], T | Unreadable], absent: S, patience: float) -> T | S | Unreadable:
    """Return what `look` finds in a file; `absent` without one, and Unreadable if it cannot be read for `patience`
    seconds."""
    give_up = time.monotonic() + patience
    while True:
        try:
            found = look()
        except (FileNotFoundError, NotADirectoryError):
            return absent
        except OSError as error:
            found = Unreadable(str(path), error.strerror or str(error))
        if not isinstance(found, Unreadable) or time.monotonic() >= give_up:
            return found
        time.sleep(LOOK_S)


def _kind_of(kinds: tuple[Any, ...], value: Any) -> Any:
    if len(kinds) == 1:
        return kinds[0]
    event = value.get("event") if isinstance(value, dict) else None
    for kind in kinds:
        if SHAPES[kind].event == event:
            return kind
    raise Mismatch("does not belong in this file")


def _parse(data: bytes) -> Any:
    """Parse JSON. Raises ValueError with a message that names no file."""
    if not data.strip():
        raise Mismatch("is empty")
    try:
        return _DECODER.decode(data.decode("utf-8"))
    except RecursionError:
        raise Mismatch("is nested too deeply") from None
    except ValueError as error:
        raise Mismatch(f"is torn or not JSON ({error})") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Mismatch(f"{text} is not finite")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
