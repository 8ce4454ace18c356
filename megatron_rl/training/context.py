"""Context-parallel attention: each rank gathers the keys and values of all ranks.

Keys and values are small with grouped queries, and the queries stay on their rank (arXiv 2407.21783, section 3.3.2). A
ring (arXiv 2310.01889) would hold two ranks' keys and values instead of all and send while it attends, but would have
to merge partial softmaxes and handle trees in each.
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
    """Attention of this rank's tokens to the tokens of all ranks."""

    part: Layout
    """Layout of this rank's queries and all keys."""
    indices_of_ranks: Tensor
    group: dist.ProcessGroup

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend as in `Layout.attend`, all tensors [part, ...]. Collective over the group, also in the backward
        pass."""
        key, value = _GatherContext.apply(key, value, self.indices_of_ranks.flatten(), self.group)
        return self.part.attend(layer, query, key, value)


class _GatherContext(torch.autograd.Function):
    """Gather keys and values of all ranks in packed order, each [part, kv_heads, head_size] -> [packed, ...].

    The gradient of a token is the sum over all ranks' queries, in fp32 as on a single rank.
    """

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, indices: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        ctx.indices, ctx.group = indices, group
        both = torch.cat((key, value), dim=1)
        gathered = both.new_empty((len(indices), *both.shape[1:]))
        dist.all_gather_into_tensor(gathered, both, group=group)
        # Separate tensors: the backward pass would keep the whole of what it has a view of.
        return tuple(torch.empty_like(each).index_copy_(0, indices, each) for each in gathered.chunk(2, dim=1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_ranks = torch.cat(gradients, dim=1).index_select(0, ctx.indices).float()
        mine = of_ranks.new_empty((len(of_ranks) // ctx.group.size(), *of_ranks.shape[1:]))
        dist.reduce_scatter_tensor(mine, of_ranks, group=ctx.group)
        return *mine.to(gradients[0].dtype).chunk(2, dim=1), None, None
