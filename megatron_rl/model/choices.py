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


def encode_choices(choices: Choices) -> list[Any]:
    """Encode choices in JSON: number of tokens, those without choices, and the bytes of all others in base 64."""
    unknown = [at for at, each in enumerate(choices) if not each]
    return [len(choices), unknown, base64.b64encode(b"".join(choices)).decode("ascii")]


def decode_choices(body: Sequence[Any]) -> Choices:
    """Raises ValueError."""
    count, unknown, text = body
    return split(base64.b64decode(text, validate=True), count, unknown)


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
