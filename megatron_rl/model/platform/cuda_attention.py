"""Attention kernels of a GPU, and the choice between them for a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.model.platform.attention import PLAIN, AttentionForm, Layout, PackedSequences, depths, widened
from megatron_rl.model.platform.dense_attention import FanOut, branches
from megatron_rl.model.platform.device import UnsupportedPlatform
from megatron_rl.model.platform.flash_kernels import PagedKernel, VarlenAttend, VarlenKernel
from megatron_rl.model.platform.gpu_calls import release_of
from megatron_rl.model.platform.paged_attention import (
    ChunkAttention,
    KernelAttention,
    PagedAttention,
    PagedChunks,
    PagedRows,
)
from megatron_rl.model.platform.tree_attention import BLOCK, Blocks, compiled_attention, tree_layout
from megatron_rl.model.platform.tree_attention import Attend as TreeAttend
from megatron_rl.recipe.kernel_speed import key_splits

WITHOUT_TRITON = "Triton, which every build of torch for CUDA brings, cannot be imported: reinstall torch"
TREE_SPEED = 0.7
"""Blocks that FlexAttention computes in the time of one block of a flash kernel."""
GATHERED_BLOCK = 2.0
"""Blocks that a flash kernel computes in the time to gather a block of rows and sum its gradients."""


@dataclass(frozen=True, slots=True)
class CudaAttention:
    varlen: VarlenKernel | None  # None if this machine has none
    tree: TreeAttend = compiled_attention
    pages: Sequence[PagedKernel] = ()

    def layout(
        self,
        packed: PackedSequences,
        device: torch.device,
        dtype: torch.dtype,
        part: Tensor | None = None,
        *,
        sinks: bool = False,
    ) -> Layout:
        """Return the faster layout in half precision. In fp32 it is always FlexAttention: flash kernels do not support
        fp32, and torch's own attention with grouped key/value heads falls back to a kernel that stores all scores. The
        same holds for a part of the tokens (see `Kernels.attention_layout`): a flash kernel would need the chunks of
        each tree separately, and the keys before them again for each. It also holds for attention with sinks, which
        needs the gradient of the logarithms of sums: flash-attn and torch compute none."""
        if sinks and release_of(torch.__version__) < (2, 9):
            raise UnsupportedPlatform(f"attention with sinks needs torch 2.9 or later, and this is {torch.__version__}")
        if self.varlen is None or not self.gathers_branches(dtype, in_parts=part is not None, sinks=sinks):
            return tree_layout(packed, device, self.tree, part)
        if tree_is_faster(packed.subtree_ends.numpy()):
            return tree_layout(packed, device, self.tree)
        return varlen_layout(packed, device, self.varlen.attend)

    def paged(self, rows: PagedRows, dtype: torch.dtype) -> PagedAttention:
        """Return attention by a kernel that reads pages. It does not depend on `bounds`, so that one recording serves
        all lengths; it reads only the tokens that each row has."""
        kernel = self.page_kernel(dtype, rows.page_tokens)
        longest = rows.table.shape[1] * rows.page_tokens
        return KernelAttention(kernel.attend, rows.table, rows.lengths.int(), longest, key_splits(longest))

    def chunks(self, chunks: PagedChunks, device: torch.device, dtype: torch.dtype) -> PagedAttention:
        kernel = self.page_kernel(dtype, chunks.page_tokens)
        return ChunkAttention.of(chunks, kernel.attend_chunks, device)

    def page_kernel(self, dtype: torch.dtype, page_tokens: int) -> PagedKernel:
        """Return the fastest kernel that supports pages of this dtype and size. Raises UnsupportedPlatform."""
        for kernel in self.pages:
            if kernel.reads(dtype, page_tokens):
                return kernel
        raise UnsupportedPlatform(WITHOUT_TRITON)

    def gathers_branches(self, dtype: torch.dtype, *, in_parts: bool, sinks: bool) -> bool:
        """Whether a micro-batch may use a flash kernel, which needs the branches of trees gathered. The choice is made
        after packing; until then every micro-batch counts as if it did."""
        return self.varlen is not None and dtype is not torch.float32 and not in_parts and not sinks

    @property
    def description(self) -> str:
        # The first one that supports their dtype and size.
        pages = f"pages by {' or '.join(kernel.name for kernel in self.pages)}"
        if self.varlen is None:
            return (
                f"FlexAttention, since flash-attn 2.7.4, Transformer Engine 2.4 and torch 2.12 are all missing; {pages}"
            )
        return f"{self.varlen.name}; {pages}; FlexAttention if much is shared, in fp32, with sinks, and under cp"


def tree_is_faster(subtree_ends: NDArray[np.int32]) -> bool:
    """Whether FlexAttention over a micro-batch's trees is faster than a flash kernel over their branches.

    Both process blocks of 128 queries by 128 keys. A flash kernel computes n (n + 1) / 2 blocks for a branch of n
    blocks. FlexAttention computes the blocks that any token of the trees needs, each 1 / TREE_SPEED times as slowly.
    Gathering the branches of trees, and all that is packed beside them, takes the time of GATHERED_BLOCK blocks for
    each block of rows:

        flash = sum of n (n + 1) / 2 + GATHERED_BLOCK n over branches    flex = blocks / TREE_SPEED

    Example: a prompt of 2,048 tokens with 16 answers of 200 has 2,736 + 576 against 593 / 0.7, so FlexAttention takes a
    quarter of the time. Two answers of 8,000 to a prompt of 100 have 4,160 + 256 against 4,157 / 0.7, so the flash
    kernel is faster. Without sharing the blocks are the same and nothing is gathered.

    TREE_SPEED is near the low end of what FlexAttention's authors report against FlashAttention-2 (arXiv 2412.05496).
    GATHERED_BLOCK is estimated. Attention takes 14 operations per pair of tokens and element of a query, forward (4)
    and backward (10), at some 330 Tflop/s of an H100. A gathered row moves about 26 bytes per such element, at some
    2.7 TB/s: query, key and value, 1 + 2 kv_heads / heads elements (between 1.25 and 1.5 in the shipped recipes), are
    read and written in bf16 (4 bytes); their gradients likewise in another order (4), converted to fp32 (6) and read
    for the sum (4). So a row takes the time of some 230 pairs, and a block of rows that of 1.8 blocks of 128 x 128
    pairs. Neither figure has been measured here.

    subtree_ends: see `PackedSequences`.
    """
    leaves = subtree_ends == np.arange(1, len(subtree_ends) + 1)
    seen = depths(subtree_ends)[leaves] + 1  # length of each branch: tokens that its last token sees
    if seen.sum() == len(subtree_ends):
        return False
    lengths = -(-seen // BLOCK)
    flash = (lengths * (lengths + 1) // 2 + GATHERED_BLOCK * lengths).sum()
    return bool(Blocks.of(subtree_ends).count / TREE_SPEED < flash)


# Flash kernels for variable lengths: no padding, no scores in memory. Half precision only, and shared tokens must be
# gathered for each branch.


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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        size = value.shape[-1]
        value = widened(value, key.shape[-1])
        if self.branches is None:
            # A view would keep the projection's whole output for the backward pass.
            attended = self.kernel(query, key, value.contiguous(), self.cu_seqlens, self.longest, form)
            return attended[..., :size].flatten(1)
        query, key, value = (self.branches.fan_out.gather(each) for each in (query, key, value))
        attended = self.kernel(query, key, value, self.cu_seqlens, self.longest, form)
        return attended[..., :size].flatten(1).index_select(0, self.branches.outputs)


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
