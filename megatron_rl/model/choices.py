"""Experts that routers chose for the tokens of a sequence, as they travel from the engine to the training. No numpy.

A token has `layers x experts_per_token` numbers, which take a byte each up to 256 experts and two above: 384 bytes for
the 48 layers and 8 experts of Qwen3-30B-A3B. A list of bytes has an entry per token beside its log-prob and version,
and answers to one prompt share the entries of the prompt.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

Choices = list[bytes]
"""Choices of a sequence's tokens from the first one on. Empty bytes are unknown choices, as are those of all tokens
behind the last entry."""


def merged(first: Choices, second: Choices) -> Choices:
    """Choices of one sequence from two passes. Those of the first pass win: they are what sampling has seen."""
    if not first:
        return second
    if len(first) >= len(second) and all(first):
        return first
    return [one or other for one, other in zip_longest(first, second, fillvalue=b"")]


def known_from(choices: Choices) -> int:
    """Return the number of tokens from the first one on whose choices are all known."""
    return next((at for at, each in enumerate(choices) if not each), len(choices))


def shared_entries(one: Choices, other: Choices) -> int:
    """Return the number of entries with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def encode_choices(choices: Choices, base: Choices = []) -> list[Any]:  # noqa: B006  never changed in place
    """Encode choices in JSON: entries at the beginning that are those of `base`, further entries, those of them without
    choices, and the bytes of all others in base 64.

    base: choices that the reader has already, such as those of another answer to the same prompt.
    """
    shared = shared_entries(choices, base)
    rest = choices[shared:]
    unknown = [at for at, each in enumerate(rest) if not each]
    return [shared, len(rest), unknown, base64.b64encode(b"".join(rest)).decode("ascii")]


def decode_choices(body: Sequence[Any], base: Choices = []) -> Choices:  # noqa: B006
    """Decode what `encode_choices` has encoded with the same base. Raises ValueError."""
    shared, count, unknown, text = body
    numbers = [shared, count, *unknown] if isinstance(unknown, list) else [-1]
    if not (all(type(each) is int and each >= 0 for each in numbers) and isinstance(text, str)):
        raise ValueError("choices are not two numbers of tokens, a list of such numbers and a text")
    if not 0 <= shared <= len(base):
        raise ValueError(f"{shared} of {len(base)} choices are to be shared")
    return base[:shared] + split(base64.b64decode(text, validate=True), count, unknown)


def split(data: bytes, count: int, unknown: Sequence[int]) -> Choices:
    """Return the choices of `count` tokens, of which `unknown` have none, from the bytes of all others joined. Raises
    ValueError if the bytes cannot be divided among them."""
    known = count - len(unknown)
    width, rest = divmod(len(data), known) if known else (0, len(data))
    if rest or known < 0 or (known and not width):
        raise ValueError(f"{len(data)} bytes are not the choices of {known} tokens")
    parts = iter(range(0, len(data), width) if known else ())
    absent = set(unknown)
    return [b"" if at in absent else data[(start := next(parts)) : start + width] for at in range(count)]
