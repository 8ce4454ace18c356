"""Packages of what a rank exchanges with other ranks in one round: parts of tensors, one after the other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.generate.refit.plan import Box, Move

ROUND_BYTES = 16 << 20
"""Bytes that a rank sends, and receives, at once: enough to keep a network busy. On a CPU, larger rounds take twice as
long, because the C library allocates buffers above 32 MiB from the kernel each time."""
ALIGNMENT = 16
"""Sizes of packages are multiples of this number of bytes, so that any dtype may start at any package."""


def aligned(size: int) -> int:
    return math.ceil(size / ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Package:
    """Parts of tensors of one dtype, one after the other, that go from one rank to another in one round."""

    peer: int
    dtype: torch.dtype
    parts: Sequence[Tensor]

    @property
    def elements(self) -> int:
        return sum(part.numel() for part in self.parts)

    @property
    def bytes(self) -> int:
        return aligned(self.elements * self.dtype.itemsize)

    def packed(self) -> Tensor:
        """[bytes] Current values of the parts, padded with zeros."""
        packed = torch.empty(self.bytes, dtype=torch.uint8, device=self.parts[0].device)
        packed[-ALIGNMENT:] = 0
        torch.cat([part.reshape(-1) for part in self.parts], out=self._content(packed))
        return packed

    def unpack(self, packed: Tensor) -> None:
        self.scatter(packed.to(self.parts[0].device, non_blocking=True))

    def scatter(self, packed: Tensor) -> None:
        """[bytes] Copy received values into the parts, from the device where they are; complete when the device is."""
        values = self._content(packed).split([part.numel() for part in self.parts])
        for part, received in zip(self.parts, values, strict=True):
            part.copy_(received.view(part.shape), non_blocking=True)

    def _content(self, packed: Tensor) -> Tensor:
        return packed.view(self.dtype)[: self.elements]


def packages(moves: Iterable[Move], rank: int, parts: Mapping[Box, Tensor], *, sends: bool) -> list[Package]:
    """Packages that a rank sends in a round, made of its parts; or, without `sends`, those that it receives."""
    found: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
    for move in moves:
        own, peer, outer = (move.source, move.target, move.held) if sends else (move.target, move.source, move.needed)
        if own == rank:
            found[peer, move.box.dtype].append(parts[outer][move.box.within(outer)])
    return [Package(peer, dtype, own_parts) for (peer, dtype), own_parts in found.items()]
