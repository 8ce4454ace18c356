"""JSON form of record types: declared once, by the type itself, and checked in both directions.

    @record()
    class Done(NamedTuple):
        attempt: int
        step: int | None
        at: float

    to_json(Done(3, 40, 1e9))             {"version": 1, "attempt": 3, "step": 40, "at": 1e9}
    from_json(Done, {"attempt": "3"})     raises Mismatch: attempt: expected a whole number, got text

Field types: int, float (an int is accepted too), str, bool, Any, other records, list and dict[str, ...] of them, and
`... | None` of any of these. A None field whose default is None is omitted from the JSON. Do not modify lists and
dictionaries of a record.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Collection
from functools import partial
from typing import Any, Callable, NamedTuple, Optional, TypeVar, Union

T = TypeVar("T")

LARGEST_INT = 2**63  # larger numbers are damage, and would raise OverflowError in arithmetic with floats
LARGEST_FLOAT = 1e100  # so are these: sums of their squares would not be finite


class Mismatch(ValueError):
    """A JSON value does not match its record type; the message says where and how."""

    def __init__(self, how: str, place: str = "") -> None:
        super().__init__(how, place)
        self.how, self.place = how, place

    def __str__(self) -> str:
        joint = "" if not self.place else " " if self.how == MISSING else ": "
        return f"{self.place}{joint}{self.how}"

    def below(self, key: str) -> Mismatch:
        """Return the same mismatch, seen from the object that has the value at `key`."""
        return Mismatch(self.how, f"{key}.{self.place}" if self.place else key)


MISSING = "is missing"
REQUIRED = object()  # stands for the default of a field that has none

Reader = Callable[[Any], Any]
"""Returns the value of a field, given the JSON value. Raises Mismatch."""


class Shape(NamedTuple):
    version: int | None
    event: str | None
    rest: str | None  # field with all other keys
    keys: dict[str, str]  # field -> its key in the JSON; without `rest`
    types: dict[str, Any]  # field -> annotation; without `rest`
    readers: list[tuple[str, Reader, Any]]  # key, check and default or REQUIRED of each field, in order; without `rest`
    defaults: dict[str, Any]
    own_keys: frozenset[str]  # keys that are not among `rest`


SHAPES: dict[Any, Shape] = {}


def record(
    version: int | None = 1,
    event: str | None = None,
    keys: dict[str, str] | None = None,
    rest: str | None = None,
    least: dict[str, int] | None = None,
) -> Callable[[type[T]], type[T]]:
    """Declare a NamedTuple to be a record.

    Args:
        version: raised with every change that older readers would misunderstand; an additional field with a default
            is not one. Readers reject newer versions; a missing version counts as 1. None: no version, for parts of
            other records and for lines that people read with their own tools.
        event: value of the key `event`, which distinguishes the kinds of lines of one file.
        keys: field -> its key in the JSON, if that is not a Python name.
        rest: the last field, a dict[str, Any], with all keys that belong to no other field.
        least: field -> its lowest value, for numbers that readers divide by.
    """

    def declare(kind: type[T]) -> type[T]:
        named: Any = kind
        module = vars(sys.modules[kind.__module__])
        types = {field: _type(text, module) for field, text in named.__annotations__.items() if field != rest}
        names = {field: (keys or {}).get(field, field) for field in types}
        defaults = named._field_defaults
        checks = {field: _reader(its) for field, its in types.items()}
        checks.update({field: partial(_at_least, lowest, checks[field]) for field, lowest in (least or {}).items()})
        readers = [(names[field], check, defaults.get(field, REQUIRED)) for field, check in checks.items()]
        tags = {"version": version, "event": event}
        own = frozenset(names.values()) | {tag for tag, its in tags.items() if its is not None}
        SHAPES[kind] = Shape(version, event, rest, names, types, readers, dict(defaults), own)
        return kind

    return declare


def _type(annotation: Any, module: dict[str, Any]) -> Any:
    """Type of an annotation. `int | None` is text, since Python 3.9 cannot evaluate it: it becomes Optional[int]."""
    text = getattr(annotation, "__forward_arg__", annotation)
    if not isinstance(text, str):
        return annotation
    kind = eval(text.removesuffix(" | None"), module)  # source of this package, never data
    return Optional[kind] if text.endswith(" | None") else kind


def to_json(value: Any) -> dict[str, Any]:
    """Return the JSON object of a record. Raises Mismatch if a field does not match its type."""
    plain: dict[str, Any] = _plain(value)
    from_json(type(value), plain)
    return plain


def from_json(kind: type[T], value: Any) -> T:
    """Return the record of a JSON object, ignoring unknown keys. Raises Mismatch."""
    found: T = _read_record(kind, value)
    return found


def _plain(value: Any) -> Any:
    shape = SHAPES.get(type(value))
    if shape is not None:
        return _plain_record(shape, value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _plain_record(shape: Shape, value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    if shape.version is not None:
        plain["version"] = shape.version
    if shape.event is not None:
        plain["event"] = shape.event
    for field, key in shape.keys.items():
        item = getattr(value, field)
        if item is not None or shape.defaults.get(field, "") is not None:
            plain[key] = _plain(item)
    if shape.rest is not None:
        others = _plain(getattr(value, shape.rest))
        taken = sorted(shape.own_keys.intersection(others))
        if taken:
            raise Mismatch(f"{shape.rest}: {taken[0]} is the name of a field")
        plain.update(others)
    return plain


def _read_record(kind: Any, value: Any) -> Any:
    shape = SHAPES[kind]
    if not isinstance(value, dict):
        raise _mismatch("a JSON object", value)
    if shape.version is not None:
        _check_version(shape.version, value.get("version", 1))
    if shape.event is not None and value.get("event") != shape.event:
        raise _mismatch(repr(shape.event), value.get("event")).below("event")
    given: list[Any] = []
    key = ""
    try:
        for key, read, default in shape.readers:
            if key in value:
                given.append(read(value[key]))
            elif default is REQUIRED:
                raise Mismatch(MISSING)
            else:
                given.append(copy.copy(default))  # not shared with other records
    except Mismatch as error:
        raise error.below(key) from None
    if shape.rest is not None:
        others = dict(value)
        for key in shape.own_keys:
            others.pop(key, None)
        given.append(others)
    return kind._make(given)


def _check_version(known: int, found: Any) -> None:
    if type(found) is not int or found < 1:
        raise _mismatch("a whole number of at least 1", found).below("version")
    if found > known:
        raise Mismatch(f"was written by a newer mrl (version {found}, this one knows {known})")


def _reader(kind: Any) -> Reader:
    """Check of values of an annotation, made once: a record of rollouts has a million values."""
    if kind is Any:
        return lambda value: value
    if kind in SHAPES:
        return partial(_read_record, kind)
    if kind in SCALARS:
        return partial(_read_scalar, kind)
    items = [_reader(argument) for argument in kind.__args__ if argument is not type(None)]
    if kind.__origin__ is Union:  # Optional
        return lambda value: None if value is None else items[0](value)
    last = kind.__args__[-1]
    return partial(_read_list if kind.__origin__ is list else _read_dict, last, items[-1])


def _read_list(kind: Any, read: Reader, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise _mismatch("a list", value)
    if type(value) is list and _plain_values(kind, value):
        return value
    return [_read_below(str(place), read, item) for place, item in enumerate(value)]


def _read_dict(kind: Any, read: Reader, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not set(map(type, value)) <= {str}:
        raise _mismatch("a JSON object", value)
    if _plain_values(kind, value.values()):
        return value
    return {key: _read_below(key, read, item) for key, item in value.items()}


# Lists of tokens are long: where all items are of the type, two looks at the whole list find no fault either.
def _plain_values(kind: Any, values: Collection[Any]) -> bool:
    """Whether values are scalars of a type and in range, so that they need no further look."""
    if kind not in SCALARS or not set(map(type, values)) <= {kind}:
        return False
    if kind in (str, bool) or not values:
        return True
    if kind is int:
        return bool(min(values) >= -LARGEST_INT and max(values) <= LARGEST_INT)
    return all(map(math.isfinite, values)) and min(values) >= -LARGEST_FLOAT and max(values) <= LARGEST_FLOAT


def _read_below(key: str, read: Reader, value: Any) -> Any:
    try:
        return read(value)
    except Mismatch as error:
        raise error.below(key) from None


def _at_least(lowest: int, read: Reader, value: Any) -> Any:
    found = read(value)
    if found is not None and found < lowest:
        raise Mismatch(f"expected a number of at least {lowest}, got {found}")
    return found


SCALARS = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}


def _read_scalar(kind: Any, value: Any) -> Any:
    if kind in (bool, str) and isinstance(value, kind):
        return value
    if kind is float and type(value) is float and -LARGEST_FLOAT <= value <= LARGEST_FLOAT:
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    in_range = number and abs(value) <= (LARGEST_FLOAT if isinstance(value, float) else LARGEST_INT)
    if in_range and (kind is float or (kind is int and isinstance(value, int))):
        return kind(value)
    raise _mismatch(SCALARS[kind], value)


def _mismatch(expected: str, value: Any) -> Mismatch:
    names = {type(None): "null", bool: "true or false", str: "text", list: "a list", dict: "a JSON object"}
    found = names.get(type(value), "a number out of range or of the wrong type")
    return Mismatch(f"expected {expected}, got {found}")
