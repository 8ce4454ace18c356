"""Differences between a package and the one sent before it: indices and values of changed elements.

An optimizer step moves most weights by less than the distance to the next bf16 number: at a learning rate of 1e-6 one
bf16 weight in 250 changes (SmolLM2-135M; tests/benchmarks/README.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.refit.packages import aligned

WHOLE = -1
"""Count that stands for the whole package."""
_BITS = {2: torch.int16, 4: torch.int32}
"""Integer type by bytes of an element. Other sizes are sent whole."""


def size_of(count: int, element: int) -> int:
    """Bytes of `count` int32 indices and `count` values of `element` bytes each."""
    return aligned(count * (4 + element))


def difference(now: Tensor, before: Tensor, element: int) -> tuple[int, Tensor]:
    """Number of changed elements, and [bytes] their indices and values; (WHOLE, now) if that is no smaller.

    Args:
        now, before: [bytes] packages of the same parts, on one device.
        element: bytes of an element.
    """
    if (bits := _BITS.get(element)) is None:
        return WHOLE, now
    values = now.view(bits)
    indices = (values != before.view(bits)).nonzero().view(-1)
    count = len(indices)
    if size_of(count, element) >= len(now):
        return WHOLE, now
    delta = torch.zeros(size_of(count, element), dtype=torch.uint8, device=now.device)
    delta[: 4 * count] = indices.to(torch.int32).view(torch.uint8)
    delta[4 * count : (4 + element) * count] = values[indices].view(torch.uint8)
    return count, delta


def apply(delta: Tensor, count: int, package: Tensor, element: int) -> None:
    """Write the changed elements of `delta` [bytes] into `package` [bytes]."""
    bits = _BITS[element]
    indices = delta[: 4 * count].view(torch.int32)
    package.view(bits)[indices.long()] = delta[4 * count : (4 + element) * count].view(bits)
