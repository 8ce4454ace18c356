"""Attention over packed sequences by flash kernels for variable lengths: no padding, no scores in memory.

Half precision only. Shared tokens must be gathered for each branch: cuda_attention.py decides when that pays.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_rl.platform.attention import PackedSequences
from megatron_rl.platform.dense_attention import FanOut, branches

logger = logging.getLogger(__name__)

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""query [tokens, heads, head_size], key and value [tokens, kv_heads, head_size], cu_seqlens [sequences + 1] int32 on
the same device, tokens of the longest sequence -> [tokens, heads, head_size]: causal attention within each sequence."""


@dataclass(frozen=True, slots=True)
class VarlenKernel:
    """A flash kernel and the name of its package."""

    name: str
    attend: Attend


def find_varlen_kernel() -> VarlenKernel | None:
    """Return the first kernel that can be imported: Transformer Engine's, which selects the fastest for the GPU,
    cuDNN's or flash-attn's; flash-attn's; torch's own, with grouped queries since 2.12. None without any."""
    for find in (_transformer_engine, _flash_attn, _torch):
        try:
            kernel = find()
        except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
            logger.debug("no attention by %s: %s", find.__name__.lstrip("_"), error)
        else:
            if kernel is not None:
                return kernel
    return None


def _transformer_engine() -> VarlenKernel:
    import transformer_engine
    from transformer_engine.pytorch import DotProductAttention

    @cache
    def module(heads: int, kv_heads: int, head_size: int) -> Any:
        return DotProductAttention(
            num_attention_heads=heads,
            kv_channels=head_size,
            num_gqa_groups=kv_heads,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type="padding_causal",
        )

    def attend(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        attended: Tensor = module(query.shape[1], key.shape[1], query.shape[2])(
            query,
            key,
            value,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            pad_between_seqs=False,  # otherwise the host reads it from the device
        )
        return attended.view(query.shape)

    return VarlenKernel(f"Transformer Engine {transformer_engine.__version__}", attend)


def _flash_attn() -> VarlenKernel:
    import flash_attn

    def attend(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        attended: Tensor = flash_attn.flash_attn_varlen_func(
            query, key, value, cu_seqlens, cu_seqlens, longest, longest, causal=True
        )
        return attended

    return VarlenKernel(f"flash-attn {flash_attn.__version__}", attend)


def _torch() -> VarlenKernel | None:
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
        return None

    def attend(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        attended = varlen_attn(
            query, key, value, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0), enable_gqa=True
        )
        assert isinstance(attended, Tensor)  # no extra results were requested
        return attended

    return VarlenKernel(f"torch {torch.__version__} varlen_attn", attend)


@dataclass(frozen=True, slots=True)
class Branches:
    """Trees split into branches: each is a sequence from the root of its tree to a leaf."""

    fan_out: FanOut
    """Gathers the tokens of all branches."""
    outputs: Tensor
    """[tokens] index of a copy of each packed token in the branches."""


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """Causal attention within consecutive sequences: the packed ones, or all branches of their trees."""

    kernel: Attend
    cu_seqlens: Tensor
    """[sequences + 1] int32, on the device."""
    longest: int
    """Tokens of the longest sequence."""
    branches: Branches | None = None
    """Set if trees have several branches."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.branches is None:
            # A view would keep the projection's whole output for the backward pass.
            return self.kernel(query, key, value.contiguous(), self.cu_seqlens, self.longest).flatten(1)
        query, key, value = (self.branches.fan_out.gather(each) for each in (query, key, value))
        attended = self.kernel(query, key, value, self.cu_seqlens, self.longest)
        return attended.flatten(1).index_select(0, self.branches.outputs)


def varlen_layout(packed: PackedSequences, device: torch.device, kernel: Attend) -> VarlenLayout:
    """Build the layout of packed sequences in which each branch attends separately."""
    edges, ends = packed.cu_seqlens.tolist(), packed.subtree_ends
    found = [each for first, stop in pairwise(edges) for each in branches(ends, first, stop)]
    lengths = [len(each) for each in found]
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
    if sum(lengths) == len(ends):
        return VarlenLayout(kernel, cu_seqlens, max(lengths))
    rows = torch.tensor([token for each in found for token in each])
    outputs = torch.empty(len(ends), dtype=torch.long)
    outputs[rows] = torch.arange(len(rows))  # any copy of a shared token: all see the same
    taken_apart = Branches(FanOut.of(rows, len(ends)).to(device), outputs.to(device, non_blocking=True))
    return VarlenLayout(kernel, cu_seqlens, max(lengths), taken_apart)
