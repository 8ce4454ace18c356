"""Hypothesis strategies for every record type, derived from its declaration."""

from __future__ import annotations

from typing import Any, Union

from hypothesis import strategies as st

from megatron_rl.contract import attempt_records, run_records
from megatron_rl.contract.shapes import LARGEST_FLOAT, LARGEST_INT, SHAPES

TYPES = [
    kind
    for module in (attempt_records, run_records)
    for kind in vars(module).values()
    if isinstance(kind, type) and kind in SHAPES and SHAPES[kind].version is not None
]
"""Record types that fill a file, or a line with a version."""
LINES = [attempt_records.TimelineLine, attempt_records.MetricsLine]

TEXT = st.text(max_size=8)
SCALARS = {
    int: st.integers(-LARGEST_INT, LARGEST_INT),
    float: st.floats(-LARGEST_FLOAT, LARGEST_FLOAT),
    str: TEXT,
    bool: st.booleans(),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | SCALARS[float] | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def of(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a field."""
    if annotation is Any:
        return JSON
    if annotation in SHAPES:
        return records(annotation)
    if annotation in SCALARS:
        return SCALARS[annotation]
    origin, arguments = annotation.__origin__, annotation.__args__
    if origin is Union:
        return st.none() | of(arguments[0])
    if origin is list:
        return st.lists(of(arguments[0]), max_size=3)
    assert origin is dict, f"{annotation}: no kind of field that shapes.py knows"
    return st.dictionaries(TEXT, of(arguments[1]), max_size=3)


def records(kind: Any) -> st.SearchStrategy[Any]:
    """Records of a type."""
    shape = SHAPES[kind]
    fields = {field: of(annotation) for field, annotation in shape.types.items()}
    if shape.rest is not None:
        own = {*shape.keys.values(), "version", "event"}
        names = TEXT.filter(lambda name: name not in own)
        fields[shape.rest] = st.dictionaries(names, JSON, max_size=3)
    return st.builds(kind, **fields)
