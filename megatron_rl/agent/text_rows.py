"""Rows of JSON and CSV files, each value as the file spells it.

`datasets` guesses one type for a whole column: it reads "2024-01-02" as a time stamp, rounds long integers, and writes
quotes around every text of a column in which one row holds a number. A right answer must not change by being read.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import IO, Any

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
"""Endings of the files that are read here; each may be compressed, as .jsonl.gz is."""


DELIMITERS = {".csv": ",", ".tsv": "\t"}


class SpelledNumber(float):
    """A number of a JSON file together with its text there: 1.50 stays 1.50."""

    def __new__(cls, text: str) -> SpelledNumber:
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


def text_rows(file: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row of a file after where it stands (`data.jsonl:7`): objects of JSON, one a line or in one list, or lines
    of a table under a line of names. Numbers of JSON that are no plain integers are `SpelledNumber`.

    Raises:
        OSError: the file cannot be read.
        ValueError: a row is no object, or no JSON at all; says where.
    """
    # It comes with `datasets`; the launcher, which only checks arguments, lacks it.
    from fsspec.implementations.local import LocalFileSystem

    kind = next((each for each in reversed(PurePath(file).suffixes) if each in SUFFIXES), "")  # data.csv.gz: .csv
    with LocalFileSystem().open(file, "rt", encoding="utf-8-sig", newline="", compression="infer") as opened:
        if kind in DELIMITERS:
            yield from _table(file, opened, DELIMITERS[kind])
        else:
            yield from _objects(file, opened)


def value_at(value: Any, path: Sequence[str]) -> Any:
    """Value at a path of keys and indices below a value of JSON; None where it leads nowhere."""
    for part in path:
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal():
            value = value[int(part)] if int(part) < len(value) else None
        else:
            return None
    return value


def as_text(value: Any) -> str | None:
    """A value of JSON as text: a string as it is, a number as the file has it, a list or an object as JSON."""
    if value is None or isinstance(value, str):
        return value
    return value.text if isinstance(value, SpelledNumber) else json.dumps(value)


def _objects(file: str, opened: IO[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for where, row in _values(file, opened):
        if not isinstance(row, Mapping):
            raise ValueError(f'{where}: expected an object, such as {{"problem": ..., "answer": ...}}')
        yield where, row


def _values(file: str, opened: IO[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(opened, 1):
        if not line.strip():
            continue
        if line.lstrip().startswith("["):  # one list holds all rows
            for place, row in enumerate(_parsed(line + opened.read(), file), 1):
                yield f"{file}: row {place}", row
            return
        yield f"{file}:{number}", _parsed(line, f"{file}:{number}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text, parse_float=SpelledNumber, parse_int=_integer, parse_constant=SpelledNumber)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: no JSON: {error}") from error


def _integer(text: str) -> int | SpelledNumber:
    """Python refuses to read integers of thousands of digits, and drops the sign of -0."""
    return int(text) if len(text) < 1000 and text != "-0" else SpelledNumber(text)


def _table(file: str, opened: IO[str], delimiter: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    csv.field_size_limit(sys.maxsize)  # worked solutions are longer than the 128 KiB that it allows by itself
    reader = csv.DictReader(opened, delimiter=delimiter, restkey="")
    try:
        for row in reader:
            if "" in row:
                raise ValueError(f"{file}:{reader.line_num}: more fields than the first line has names")
            yield f"{file}:{reader.line_num}", row
    except csv.Error as error:
        raise ValueError(f"{file}:{reader.line_num}: {error}") from error
