"""Hostile and mistaken input: odd values, and good documents and bytes that were changed in a few places.

All of it is drawn from a seed, which costs a hundredth of what strategies of Hypothesis cost for such documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any, TypeVar

from hypothesis import note
from hypothesis import strategies as st

Found = TypeVar("Found")

DEEP = 100_000
"""Depth of lists at which each recursive reader of JSON gives up."""


def nested(depth: int) -> Any:
    """A list in a list, and so on."""
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "\n", "\0", "a\0b", "\ud800", "x\udfff", "\ufffe", "\ufdd1", "\u202e", "é", "🙂", "x" * 2000),
    *("0", "-1", "1e999", "9" * 5000, "NaN", "null", "true", "[", "{", "[]", "{}", "[{}]", '"', "\\", "{question}"),
    *("{0}", "%s", "../../etc/passwd", "/dev/zero", "<|im_end|>", "{{ 1/0 }}", "{% for %}", "__class__", "[" * 3000),
    *([], {}, [None], [[]], [{}], {"": None}, {"a": {"a": {}}}, [1, "a", None], nested(60), {"type": []}),
]
DAMAGES = [b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n", b'"', b"{", b"}", b",", b"[" * 2000, b"9" * 5000, b"-"]


def odd(random: Random) -> Any:
    """An odd value, perhaps inside of another one."""
    found = deepcopy(random.choice(ODD))
    kind = random.randrange(8)
    return [found] if kind == 0 else {random.choice(["a", "", "name", "type"]): found} if kind == 1 else found


def changed(original: Any, random: Random, most: int = 3) -> Any:
    """A JSON document in which a few places were changed."""
    whole = [deepcopy(original)]
    for _ in range(random.randint(1, most)):
        places = _places(whole)
        held, key = random.choice(places)
        kind = random.choice(("odd", "odd", "odd", "odd", "remove", "double", "wrap", "rename", "swap", "cut", "near"))
        here = held[key]
        if kind == "odd":
            held[key] = odd(random)
        elif kind == "wrap":
            held[key] = [here]
        elif kind == "swap":
            other, its = random.choice(places)
            held[key] = deepcopy(other[its])
        elif kind == "cut" and isinstance(here, str | list):
            held[key] = here[: len(here) // 2]
        elif kind == "near" and isinstance(here, int | float):
            held[key] = random.choice((repr(here < 1), -here, here * 1000, not here, [here, here]))
        elif held is whole:
            continue
        elif kind == "remove":
            del held[key]
        elif kind == "double" and isinstance(held, list):
            held.insert(key, deepcopy(here))
        elif kind == "rename" and isinstance(held, dict):
            held[random.choice(["", "role", "type", "name", f"{key}s", "\0", "\ud800"])] = held.pop(key)
    return whole[0]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """All places below a value, as containers with a key or an index."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    found: list[tuple[Any, Any]] = []
    for key in keys:
        found.append((value, key))
        found += _places(value[key])
    return found


def as_json(value: Any) -> bytes:
    """JSON of a value, with NaN, infinities and lone surrogates as Python and JavaScript write them."""
    return json.dumps(value).encode()


def spoilt(original: bytes, random: Random, most: int = 3) -> bytes:
    """Bytes in which a few places were overwritten, lost, doubled or cut off."""
    data = original
    for _ in range(random.randint(1, most)):
        at = random.randrange(len(data) + 1)
        put = random.choice(DAMAGES) if random.randrange(2) else random.randbytes(random.randint(1, 8))
        kind = random.choice(("in", "over", "over", "cut", "lost", "twice"))
        if kind == "in":
            data = data[:at] + put + data[at:]
        elif kind == "over":
            data = data[:at] + put + data[at + len(put) :]
        elif kind == "cut":
            data = data[:at]
        elif kind == "lost":
            data = data[:at] + data[at + random.randint(1, 40) :]
        else:
            data = data[:at] + data[max(0, at - 60) :]
    return data


def drawn(make: Callable[[Random], Found]) -> st.SearchStrategy[Found]:
    """Values that a function makes of random numbers. An error shows them."""

    def made(seed: int) -> Found:
        found = make(Random(seed))
        note(f"{found!r:.2000}")
        return found

    return st.integers(0, 2**32).map(made)


def refusal(read: Callable[[], object], *kinds: type[BaseException]) -> str | None:
    """Call a reader, and return the sentence with which it refuses; None if it accepts. Other errors are raised."""
    try:
        read()
    except kinds as error:
        assert str(error).strip(), repr(error)
        return str(error)
    return None
