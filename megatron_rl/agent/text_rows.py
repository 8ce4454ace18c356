"""Rows of JSON and CSV files, with each value exactly as the file spells it.

The library `datasets` infers one type for a whole column: it reads "2024-01-02" as a timestamp, rounds long integers,
and quotes every text of a column in which one row holds a number. Reading must not change a right answer.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from megatron_rl.contract.bounded_json import bounded_json
from megatron_rl.recipe.data_files import PACKED, data_suffix

DELIMITERS = {".csv": ",", ".tsv": "\t"}
BOM = b"\xef\xbb\xbf"
LINE_BYTES = 4096  # read at first to find one line
LONGEST_ROW = 2**28  # characters; a row of a million tokens has a sixtieth of that
LONGEST_LIST = 2**32  # characters of one list with all rows
UNPACKERS = ("zlib", "_lzma", "zstandard", "zstd")
"""Packages of errors about compressed files; others are OSErrors."""


class SpelledNumber(float):
    """A number of a JSON file that keeps its spelling: 1.50 stays 1.50."""

    def __new__(cls, text: str) -> SpelledNumber:
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


class TextRow(NamedTuple):
    where: str
    """Location, such as `data.jsonl:7`."""
    values: Mapping[str, Any]
    offset: int | None = None
    """Byte of the file at which the row's line begins, for `line_at`; None if the row cannot be read alone."""


def text_rows(file: str) -> Iterator[TextRow]:
    """Yield each row of a file.

    Rows are JSON objects, one per line or in one list, or lines of a table below a header line. JSON numbers other than
    plain integers are `SpelledNumber`.

    Raises:
        OSError: the file cannot be read.
        ValueError: a row is not a JSON object; the message has its location.
    """
    kind = data_suffix(file)
    try:
        try:
            with _opened(file) as opened:
                if kind in DELIMITERS:
                    yield from _table(file, opened, DELIMITERS[kind])
                else:
                    yield from _objects(file, opened)
        except UnicodeDecodeError as error:
            raise ValueError(f"{_first_not_text(file)}: not UTF-8: {error.reason}; write the file as UTF-8") from error
    except Exception as error:  # packages that unpack have their own errors, and may be absent
        if not isinstance(error, EOFError) and type(error).__module__.partition(".")[0] not in UNPACKERS:
            raise
        raise ValueError(f"{file}: cut short or damaged ({error}): fetch it again") from error


def holds_lines(file: str) -> bool:
    """Whether each row of a file is JSON on a line that can be read alone: not compressed, not a table, not a list.
    Raises OSError."""
    if Path(file).suffix in PACKED or data_suffix(file) in DELIMITERS:
        return False
    with Path(file).open("rb") as opened:
        return not opened.read(LINE_BYTES).removeprefix(BOM).lstrip().startswith(b"[")


def line_at(descriptor: int, offset: int) -> str:
    """Return the line of a text file that begins at a byte. Raises OSError, and ValueError if it is not UTF-8."""
    size = LINE_BYTES
    while True:
        data = os.pread(descriptor, size, offset)
        ends = [end for end in (data.find(b"\n"), data.find(b"\r")) if end >= 0]
        if ends or len(data) < size:
            return data[: min(ends, default=None)].decode()
        size *= 8


def value_at(value: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of keys and indices below a JSON value; None if the path does not exist."""
    for part in path:
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal():
            value = value[int(part)] if int(part) < len(value) else None
        else:
            return None
    return value


def as_text(value: Any) -> str | None:
    """Return a JSON value as text: a string unchanged, a number as the file spells it, a list or an object as JSON."""
    if value is None or isinstance(value, str):
        return value
    return value.text if isinstance(value, SpelledNumber) else json.dumps(value)


def parse_json(text: str, where: str) -> Any:
    """Parse JSON, with each number as it is spelled. Raises ValueError with the location."""
    try:
        return bounded_json(text, parse_float=SpelledNumber, parse_int=_integer, parse_constant=SpelledNumber)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from error


def _opened(file: str) -> IO[str]:
    name = PACKED.get(Path(file).suffix)
    try:
        module = importlib.import_module(name) if name else None
    except ImportError as error:
        raise ValueError(f"{file}: reading it needs `pip install {name}`") from error
    text = {"mode": "rt", "encoding": "utf-8-sig", "newline": ""}
    return cast(IO[str], module.open(file, **text) if module else Path(file).open(**text))  # type: ignore[call-overload]


def _objects(file: str, opened: IO[str]) -> Iterator[TextRow]:
    for row in _values(file, opened):
        if not isinstance(row.values, Mapping):
            raise ValueError(f'{row.where}: expected an object, such as {{"problem": ..., "answer": ...}}')
        yield row


def _values(file: str, opened: IO[str]) -> Iterator[TextRow]:
    """Yield what stands in each row, which may be another JSON value than an object."""
    alone = Path(file).suffix not in PACKED
    offset = _bom_bytes(file) if alone else 0
    for number, line in enumerate(_lines(file, opened), 1):
        begin, offset = offset, offset + (len(line) if line.isascii() else len(line.encode()))
        if not line.strip():
            continue
        if line.lstrip().startswith("["):  # one list holds all rows
            text = line + opened.read(LONGEST_LIST)
            if len(text) > LONGEST_LIST:
                raise ValueError(f"{file}: one list of more than {LONGEST_LIST:,} characters: write a row on each line")
            for place, row in enumerate(parse_json(text, file), 1):
                yield TextRow(f"{file}: row {place}", row)
            return
        where = f"{file}:{number}"
        yield TextRow(where, parse_json(line, where), begin if alone else None)


def _lines(file: str, opened: IO[str]) -> Iterator[str]:
    """Yield the lines. Raises ValueError for one that is too long: a few packed bytes may be gigabytes."""
    number = 0
    while line := opened.readline(LONGEST_ROW):
        number += 1
        if len(line) == LONGEST_ROW:
            raise ValueError(f"{file}:{number}: a row of more than {LONGEST_ROW:,} characters")
        yield line


def _first_not_text(file: str) -> str:
    """Return the location of the first line that is not UTF-8."""
    name = PACKED.get(Path(file).suffix)
    with importlib.import_module(name).open(file) if name else Path(file).open("rb") as opened:
        for number, line in enumerate(opened, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"{file}:{number}"
    return file


def _bom_bytes(file: str) -> int:
    with Path(file).open("rb") as opened:
        return len(BOM) if opened.read(len(BOM)) == BOM else 0


def _integer(text: str) -> int | SpelledNumber:
    return int(text) if len(text) < 1000 and text != "-0" else SpelledNumber(text)


def _table(file: str, opened: IO[str], delimiter: str) -> Iterator[TextRow]:
    csv.field_size_limit(LONGEST_ROW)  # worked solutions may exceed the default of 128 KiB
    reader = csv.DictReader(_lines(file, opened), delimiter=delimiter, restkey="")
    try:
        for row in reader:
            if "" in row:
                raise ValueError(f"{file}:{reader.line_num}: the row has more fields than the header line")
            yield TextRow(f"{file}:{reader.line_num}", row)
    except csv.Error as error:
        raise ValueError(f"{file}:{reader.line_num}: {error}") from error
