"""JSON that others wrote: rows, requests, replies, files of models."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

DEEPEST = 100
"""Lists and objects inside one another that are read; published rows and schemas have some twenty. What later copies,
pickles or writes a value calls itself for each of them, with what Python's stack has left at that place."""


def bounded_json(text: str | bytes, **options: Any) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is not JSON, or is nested too deeply.

    options: of `json.loads`.
    """
    try:
        found = json.loads(text, **options)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    brackets = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if brackets > DEEPEST and _is_deeper(found):
        raise ValueError(_too_deep())
    return found


def _is_deeper(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [each for held in level for each in _items(held) if isinstance(each, (dict, list))]
        if not level:
            return False
    return True


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep() -> str:
    return f"it has more than {DEEPEST} lists and objects inside one another"
