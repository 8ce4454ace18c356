"""A micro-batch as one context-parallel rank reads it: its part of the tokens, and attention to those of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.context import ContextPart, context_part
from megatron_rl.algorithms.packing import MicroBatch
from megatron_rl.model.platform.attention import PLAIN, AttentionForm, Layout, widened
from megatron_rl.model.platform.paths import PathLayout, Recurrence
from megatron_rl.model.policy import Policy


def part_of(
    policy: Policy, batch: MicroBatch, context: dist.ProcessGroup | None
) -> tuple[MicroBatch | ContextPart, Layout]:
    """Return this rank's part of a micro-batch, or the whole if no ranks share it, and its layout on the device.

    context: ranks that share the tokens; None if this rank has all.
    """
    if context is None or context.size() == 1:
        return batch, policy.layout(batch)
    part = context_part(batch, context.rank(), context.size())
    of_part = policy.layout(part.whole, part.indices)
    return part, ContextLayout(of_part, part.indices_of_ranks.to(policy.device), context)


@dataclass(frozen=True, slots=True)
class ContextLayout:
    """Attention of this rank's tokens to the tokens of all ranks."""

    part: Layout  # layout of this rank's queries and all keys
    indices_of_ranks: Tensor
    group: dist.ProcessGroup

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        """Attend as in `Layout.attend`, all tensors [part, ...]. Collective over the group, also in the backward
        pass."""
        size = value.shape[-1]
        both = key, widened(value, key.shape[-1])  # gathered as one tensor
        key, value = _GatherContext.apply(*both, self.indices_of_ranks.flatten(), self.group)
        return self.part.attend(layer, query, key, value[..., :size], form)

    def recur(self, layer: int, tokens: Tensor, recurrence: Recurrence) -> Tensor:
        """Compute the tokens of all ranks on each of them, and keep this rank's, [part, ...] -> [part, outputs]: the
        state behind a token depends on all before it. Collective as `attend`."""
        assert isinstance(self.part, PathLayout)
        halves = _GatherContext.apply(*tokens.chunk(2, dim=1), self.indices_of_ranks.flatten(), self.group)
        out = self.part.recur(layer, torch.cat(halves, dim=1), recurrence)
        return out.index_select(0, self.indices_of_ranks[self.group.rank()])


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
