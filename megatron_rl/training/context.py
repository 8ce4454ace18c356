"""Attention where context-parallel ranks share out the tokens: each gathers the keys and values of all.

They are small where queries are grouped, and the queries stay where they are (arXiv 2407.21783, section 3.3.2). A ring
(arXiv 2310.01889) would hold two ranks' keys and values at a time instead of all, and send while it attends; it would
have to add up parts of a softmax, and know of trees in each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.platform.attention import Layout


@dataclass(frozen=True, slots=True)
class ContextLayout:
    """Attention of this rank's tokens to those of all."""

    part: Layout
    """Of this rank's queries to all keys, wherever they come from."""
    places_of_ranks: Tensor
    """[ranks, part] the packed tokens of each rank."""
    group: dist.ProcessGroup

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Layout.attend`; all of them [part, ...]. Collective over the group, and so is its backward pass."""
        key, value = _GatherContext.apply(key, value, self.places_of_ranks.flatten(), self.group)
        return self.part.attend(layer, query, key, value)


class _GatherContext(torch.autograd.Function):
    """Keys and values of all ranks in the order of the whole, each [part, kv_heads, head_size] -> [packed, ...].

    The gradient of a token is the sum of what all ranks' queries say of it, added up in fp32 as where one has them all.
    """

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, places: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        ctx.places, ctx.group = places, group
        both = torch.cat((key, value), dim=1)
        gathered = both.new_empty((len(places), *both.shape[1:]))
        dist.all_gather_into_tensor(gathered, both, group=group)
        # Each in memory of its own: the backward pass keeps all of what it keeps a view of.
        return tuple(torch.empty_like(each).index_copy_(0, places, each) for each in gathered.chunk(2, dim=1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_ranks = torch.cat(gradients, dim=1).index_select(0, ctx.places).float()
        mine = of_ranks.new_empty((len(of_ranks) // ctx.group.size(), *of_ranks.shape[1:]))
        dist.reduce_scatter_tensor(mine, of_ranks, group=ctx.group)
        return *mine.to(gradients[0].dtype).chunk(2, dim=1), None, None
