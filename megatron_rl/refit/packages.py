"""A rank's part of a model as boxes of its tensors, and packages of what it exchanges with other ranks in one round."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_rl.model.policy import Policy
from megatron_rl.refit.plan import Box, Move

ROUND_BYTES = 16 << 20
"""Bytes that a rank sends, and receives, at once: enough to keep a network busy. On a CPU, larger rounds take twice as
long, because the C library allocates buffers above 32 MiB from the kernel each time."""
ALIGNMENT = 16
"""Sizes of packages are multiples of this number of bytes, so that any dtype may start at any package."""


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A weight of a model on this rank."""

    whole: Tensor
    parts: Mapping[Box, Tensor]
    """Views of it, each in the shape of its box: one, or two for a fused gate and up projection."""


def model_tensors(policy: Policy) -> dict[tuple[Box, ...], ModelTensor]:
    """This rank's weights, by the boxes of the model that each covers."""
    found = {}
    for item in nested_values(policy.sharded_state_dict()):
        if isinstance(item, ShardedTensor | ShardedTensorFactory):
            shards = item.build() if isinstance(item, ShardedTensorFactory) else [item]
            parts = {}
            for each in shards:
                shape = (*[1] * each.prepend_axis_num, *each.local_shape)
                parts[Box(each.key, each.dtype, each.global_offset, shape)] = each.data.detach().view(shape)
            found[tuple(parts)] = ModelTensor(item.data, parts)
    return found


def parts_by_box(tensors: Iterable[ModelTensor]) -> dict[Box, Tensor]:
    return {box: part for tensor in tensors for box, part in tensor.parts.items()}


def aligned(size: int) -> int:
    """Bytes, rounded up to ALIGNMENT."""
    return math.ceil(size / ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Package:
    """Parts of tensors of one dtype, one after the other, that go from one rank to another in one round."""

    peer: int
    dtype: torch.dtype
    parts: Sequence[Tensor]
    """Views of this rank's weights."""

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
        """[bytes] Copy received values into the parts."""
        content = self._content(packed.to(self.parts[0].device, non_blocking=True))
        for part, received in zip(self.parts, content.split([part.numel() for part in self.parts]), strict=True):
            part.copy_(received.view(part.shape))

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
