"""Attention over packed sequences by flash kernels for variable lengths: no padding, no scores in memory.

Half precision only. Shared tokens must be gathered for each branch: cuda_attention.py decides when that pays.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from megatron_rl.model.platform.attention import PackedSequences
from megatron_rl.model.platform.dense_attention import FanOut, branches
from megatron_rl.model.platform.flash_kernels import VarlenAttend


@dataclass(frozen=True, slots=True)
class TreeBranches:
    """Trees split into branches: each is a sequence from the root of its tree to a leaf."""

    fan_out: FanOut
    outputs: Tensor  # [tokens] index of a copy of each packed token in the branches


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """Causal attention within consecutive sequences: the packed ones, or all branches of their trees."""

    kernel: VarlenAttend
    cu_seqlens: Tensor  # [sequences + 1] int32, on the device
    longest: int
    branches: TreeBranches | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.branches is None:
            # A view would keep the projection's whole output for the backward pass.
            return self.kernel(query, key, value.contiguous(), self.cu_seqlens, self.longest).flatten(1)
        query, key, value = (self.branches.fan_out.gather(each) for each in (query, key, value))
        attended = self.kernel(query, key, value, self.cu_seqlens, self.longest)
        return attended.flatten(1).index_select(0, self.branches.outputs)


def varlen_layout(packed: PackedSequences, device: torch.device, kernel: VarlenAttend) -> VarlenLayout:
    edges, ends = packed.cu_seqlens.tolist(), packed.subtree_ends
    found = [each for first, stop in pairwise(edges) for each in branches(ends, first, stop)]
    lengths = [len(each) for each in found]
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
    if sum(lengths) == len(ends):
        return VarlenLayout(kernel, cu_seqlens, max(lengths))
    rows = torch.tensor([token for each in found for token in each])
    outputs = torch.empty(len(ends), dtype=torch.long)
    outputs[rows] = torch.arange(len(rows))  # any copy of a shared token: all see the same
    taken_apart = TreeBranches(FanOut.of(rows, len(ends)).to(device), outputs.to(device, non_blocking=True))
    return VarlenLayout(kernel, cu_seqlens, max(lengths), taken_apart)
