"""What gloo lacks of torch.distributed's collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


class UnevenCollectives:
    """torch.distributed, whose gathering and scattering of parts of different sizes gloo refuses: here they are one
    broadcast or sum for each part. Experts of tensor-parallel ranks need them: each has tokens of its own."""

    def all_gather(self, parts: Sequence[Tensor], mine: Tensor, group: dist.ProcessGroup) -> None:
        parts[group.rank()].copy_(mine)
        for rank, part in enumerate(parts):
            if part.numel():
                dist.broadcast(part, group=group, group_src=rank)

    def reduce_scatter(self, mine: Tensor, parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        for rank, part in enumerate(parts):
            if part.numel():
                total = part.contiguous().clone()
                dist.reduce(total, group=group, group_dst=rank)
                if rank == group.rank():
                    mine.copy_(total)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)
