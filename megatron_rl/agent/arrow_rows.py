"""Rows of Parquet and Arrow files, with the values that the same rows have in JSON lines.

Arrow gives every object the keys of all objects of its column, null where a row lacks them. A model would learn to call
a tool with the arguments of all other tools, and a reward would find keys that its author never wrote. So keys without
a value are left out.
"""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from megatron_rl.agent.text_rows import SpelledNumber, parse_json

logger = logging.getLogger(__name__)

BATCH = 10_000

Reader: TypeAlias = "Callable[[Any], Any] | None"
"""Function that turns a value of Arrow, not null, into one of JSON; None where they are the same."""


def file_batches(file: str, columns: Sequence[str] | None) -> Iterator[Any]:
    """Yield the batches of a Parquet or Arrow file. columns: names to read; None: all. Raises OSError and
    pyarrow.ArrowException."""
    import pyarrow
    from pyarrow import ipc, parquet

    if Path(file).suffix == ".parquet":
        with parquet.ParquetFile(file) as opened:
            yield from opened.iter_batches(BATCH, columns=list(columns) if columns is not None else None)
        return
    with pyarrow.memory_map(file) as mapped:
        if mapped.read(6) == b"ARROW1":  # a file of Feather; `datasets` writes streams
            found = ipc.open_file(mapped)
            batches: Iterable[Any] = map(found.get_batch, range(found.num_record_batches))
        else:
            mapped.seek(0)
            batches = ipc.open_stream(mapped)
        for batch in batches:
            batch.validate(full=True)  # pyarrow reads outside of a damaged file, which may end the process
            yield batch if columns is None else batch.select(list(columns))


def file_columns(file: str) -> list[str]:
    import pyarrow
    from pyarrow import ipc, parquet

    if Path(file).suffix == ".parquet":
        return list(parquet.read_schema(file).names)
    with pyarrow.memory_map(file) as mapped:
        if mapped.read(6) == b"ARROW1":
            return list(ipc.open_file(mapped).schema.names)
        mapped.seek(0)
        return list(ipc.open_stream(mapped).schema.names)


def arrow_rows(batches: Iterable[Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each row with its location (`data.parquet: row 7`).

    batches: tables or record batches of pyarrow. where: name of what they are read from.
    """
    lacking: set[str] = set()
    number = 0
    for batch in batches:
        names = batch.schema.names
        columns = (_values(batch.column(place), name, lacking) for place, name in enumerate(names))
        for values in zip(*columns, strict=True):
            number += 1
            yield f"{where}: row {number}", dict(zip(names, values, strict=True))
    if lacking:
        logger.info(
            "%s: null keys within the objects of %s are left out: the file does not distinguish them from missing ones",
            *(where, ", ".join(sorted(lacking))),
        )


def _values(column: Any, name: str, lacking: set[str]) -> list[Any]:
    values: list[Any] = column.to_pylist()
    read = _reader(column.type, lambda: lacking.add(name))
    return values if read is None else [None if value is None else read(value) for value in values]


def _reader(kind: Any, note: Callable[[], None]) -> Reader:
    """Return the reader of a type. note: called where an object has a null key."""
    from pyarrow import types

    if types.is_struct(kind):
        return _struct_reader({field.name: _reader(field.type, note) for field in kind}, note)
    if types.is_map(kind):
        value_of = _reader(kind.item_type, note)
        return lambda pairs: {str(key): _read(value_of, value) for key, value in pairs}
    if types.is_dictionary(kind):
        return _reader(kind.value_type, note)
    if any(is_list(kind) for is_list in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
        item_of = _reader(kind.value_type, note)
        return None if item_of is None else lambda items: [_read(item_of, item) for item in items]
    if types.is_decimal(kind):
        return lambda value: SpelledNumber(format(value, "f"))
    if types.is_temporal(kind):
        return lambda value: value.isoformat() if hasattr(value, "isoformat") else value.total_seconds()
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return _text_of_bytes
    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda text: parse_json(text, "a JSON column")
    return float if types.is_float16(kind) else None


def _struct_reader(fields: Mapping[str, Reader], note: Callable[[], None]) -> Callable[[Any], Any]:
    def read(value: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: _read(fields[name], each) for name, each in value.items() if each is not None}
        if len(found) < len(value):
            note()
        return found

    return read


def _read(read: Reader, value: Any) -> Any:
    return value if value is None or read is None else read(value)


def _text_of_bytes(value: bytes) -> str:
    """Return bytes as text: their characters, or base64 if they are not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return b64encode(value).decode()
