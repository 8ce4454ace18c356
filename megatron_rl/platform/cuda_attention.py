"""How a GPU attends: by which kernels, and which of them for a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.platform.attention import Layout, PackedSequences
from megatron_rl.platform.paged_attention import PagedAttention, PagedRows, gathered_attention
from megatron_rl.platform.paged_kernels import PAGE_MULTIPLE, KernelAttention, PagedKernel
from megatron_rl.platform.tree_attention import BLOCK, Blocks, compiled_attention, tree_layout
from megatron_rl.platform.tree_attention import Attend as TreeAttend
from megatron_rl.platform.varlen_attention import VarlenKernel, varlen_layout

TREE_SPEED = 0.7
"""Blocks that FlexAttention computes in the time in which a flash kernel computes one."""
GATHERED_BLOCK = 2.0
"""Blocks that a flash kernel computes while a block of rows is gathered, and its gradients are summed."""


@dataclass(frozen=True, slots=True)
class CudaAttention:
    """The kernels of a rank."""

    varlen: VarlenKernel | None
    """None: there is none on this machine."""
    tree: TreeAttend = compiled_attention
    pages: PagedKernel | None = None
    """Of decoding; None where there is none."""

    def layout(
        self, packed: PackedSequences, device: torch.device, dtype: torch.dtype, part: Tensor | None = None
    ) -> Layout:
        """The faster one in half precision. In fp32 it is FlexAttention alone: flash kernels do not take it, and
        torch's own attention falls to a kernel that holds all scores, where key/value heads are shared. So it is for a
        part of the tokens, see `Platform.attention_layout`: a flash kernel would have to be given the chunks of each
        tree apart, and the keys before them again for each."""
        if self.varlen is None or not self.gathers_branches(dtype, in_parts=part is not None):
            return tree_layout(packed, device, self.tree, part)
        if tree_is_faster(packed.subtree_ends.numpy()):
            return tree_layout(packed, device, self.tree)
        return varlen_layout(packed, device, self.varlen.attend)

    def paged(self, rows: PagedRows, dtype: torch.dtype) -> PagedAttention:
        """By a kernel that reads pages where there is one that takes them, else what they hold is gathered. Nothing of
        the kernel's depends on `bounds`, so that it can be recorded once for all lengths; it reads as much of each row
        as that has."""
        if self.pages is None or not self.reads_pages(dtype, rows.page_tokens):
            return gathered_attention(rows)
        longest = rows.table.shape[1] * rows.page_tokens
        return KernelAttention(self.pages.attend, rows.table, rows.lengths.int(), longest)

    def reads_pages(self, dtype: torch.dtype, page_tokens: int) -> bool:
        """Whether there is a kernel for pages of so many tokens."""
        return self.pages is not None and dtype is not torch.float32 and page_tokens % PAGE_MULTIPLE == 0

    def gathers_branches(self, dtype: torch.dtype, *, in_parts: bool) -> bool:
        """Whether a micro-batch may go by a flash kernel, which the branches of trees are gathered for. Which one does
        is known once it is packed: until then each counts as if it did."""
        return self.varlen is not None and dtype is not torch.float32 and not in_parts

    @property
    def description(self) -> str:
        """Of the kernels, in words."""
        if self.varlen is None:
            return "FlexAttention: neither Transformer Engine, flash-attn nor torch 2.12 is here"
        return f"{self.varlen.name}; FlexAttention where much is shared, in fp32, and under cp"


def tree_is_faster(subtree_ends: NDArray[np.int32]) -> bool:
    """Whether FlexAttention over a micro-batch's trees is faster than a flash kernel over their branches.

    Both go through blocks of 128 queries by 128 keys, of which the flash kernel computes n (n + 1) / 2 for a branch of
    n blocks, and FlexAttention all that any of the trees' tokens need, each 1 / TREE_SPEED times as long. The branches
    of trees have to be gathered, with all that is packed beside them, which takes as long as GATHERED_BLOCK blocks for
    each block of rows:

        flash = sum of n (n + 1) / 2 + GATHERED_BLOCK n over branches    flex = blocks / TREE_SPEED

    A prompt of 2,048 tokens with 16 answers of 200: 2,736 + 576 blocks beside 593 / 0.7, which is a quarter. With two
    answers of 8,000 to a prompt of 100: 4,160 + 256 beside 4,157 / 0.7, and branch by branch it goes. Where nothing is
    shared, the blocks are the same and nothing is gathered.

    TREE_SPEED is near the low end of what FlexAttention's authors report beside FlashAttention-2 (arXiv 2412.05496).
    GATHERED_BLOCK is counted. Attention takes 14 operations for a pair of tokens and an element of a query, forward
    (4) and backward (10), at some 330 Tflop/s of an H100. A gathered row moves about 26 bytes for such an element, at
    some 2.7 TB/s: query, key and value, of which there are 1 + 2 kv_heads / heads elements, between 1.25 and 1.5 in
    the shipped recipes, are read and written in bf16 (4 bytes); their gradients likewise in another order (4), turned
    into fp32 (6) and read to be summed (4). So a row takes the time of some 230 pairs, and a block of them that of
    1.8 blocks of 128 x 128 pairs. Neither has been measured by us.

    subtree_ends: see `PackedSequences`.
    """
    places = np.arange(len(subtree_ends))
    leaves = subtree_ends == places + 1
    ended = np.bincount(subtree_ends, minlength=len(subtree_ends) + 1).cumsum()[:-1]  # before or at each place
    seen = (places + 1 - ended)[leaves]  # by the last token of each branch, which is its length
    if seen.sum() == len(subtree_ends):
        return False
    lengths = -(-seen // BLOCK)
    flash = (lengths * (lengths + 1) // 2 + GATHERED_BLOCK * lengths).sum()
    return bool(Blocks.of(subtree_ends).count / TREE_SPEED < flash)
