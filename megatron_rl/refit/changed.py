"""What of a package differs from the one before it: places and values, in place of the whole.

A step of an optimizer moves most weights by less than the distance to the next number of 8 significant bits: of bf16
weights one in 250 changes where the learning rate is 1e-6 (SmolLM2-135M; tests/benchmarks/README.md).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes of which what is sent is a multiple: any type may begin there."""
WHOLE = -1
"""In place of a count: all of the package comes as it is."""
_BITS = {2: torch.int16, 4: torch.int32}
"""By bytes of an element; others are sent whole."""


def aligned(size: int) -> int:
    """Bytes, filled up."""
    return math.ceil(size / ALIGNMENT) * ALIGNMENT


def size_of(count: int, element: int) -> int:
    """[bytes] of that many places, int32, and their values of `element` bytes each."""
    return aligned(count * (4 + element))


def difference(now: Tensor, before: Tensor, element: int) -> tuple[int, Tensor]:
    """How many elements of a package changed, and [bytes] their places and values; (WHOLE, now) where that is no less.

    Args:
        now, before: [bytes] packages of the same parts, on one device.
        element: bytes of one.
    """
    if (bits := _BITS.get(element)) is None:
        return WHOLE, now
    values = now.view(bits)
    places = (values != before.view(bits)).nonzero().view(-1)
    count = len(places)
    if size_of(count, element) >= len(now):
        return WHOLE, now
    delta = torch.zeros(size_of(count, element), dtype=torch.uint8, device=now.device)
    delta[: 4 * count] = places.to(torch.int32).view(torch.uint8)
    delta[4 * count : (4 + element) * count] = values[places].view(torch.uint8)
    return count, delta


def apply(delta: Tensor, count: int, package: Tensor, element: int) -> None:
    """[bytes] Have a package be what the difference to it says."""
    bits = _BITS[element]
    places = delta[: 4 * count].view(torch.int32)
    package.view(bits)[places.long()] = delta[4 * count : (4 + element) * count].view(bits)
