"""Attention of new tokens to a paged cache, whose pages the kernels of a GPU (flash_kernels.py) and of a CPU
(sparse_attention.py) read in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.model.platform.attention import PLAIN, AttentionForm
from megatron_rl.model.platform.flash_kernels import ChunkAttend, PagedAttend
from megatron_rl.model.platform.layer_kernels import Slots


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Sequences in pages, each with one new token at its end."""

    table: Tensor
    """[rows, pages] int32 on the device: pages of each row from its first token on, padded with arbitrary ones."""
    lengths: Tensor  # [rows] on the device: tokens of each row
    bounds: NDArray[np.int64]
    """[rows] upper bounds of `lengths` that the host knows without waiting for the device."""
    page_tokens: int
    heads: int  # query heads, a multiple of `kv_heads`
    kv_heads: int


@dataclass(frozen=True, slots=True)
class PagedChunks:
    """Sequences in pages, each with one or more new tokens at its end, on the CPU."""

    table: NDArray[np.int32]
    """[sequences, pages] pages of each sequence from its first token on, padded with arbitrary ones."""
    new: NDArray[np.int64]  # [sequences] new tokens of each, at least one
    lengths: NDArray[np.int64]  # [sequences] tokens of each, new ones included
    page_tokens: int


class PagedAttention(Protocol):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        """Attend in one layer.

        query [rows, heads, head_size], a row for each new token; keys and values of all pages, including the new
        tokens, [pages, page_tokens, kv_heads, head_size], or [pages, kv_heads, page_tokens, head_size] if they are
        gathered -> [rows, heads * head_size]
        """


@runtime_checkable
class InPlaceLayout(Protocol):
    """A layout of single new tokens whose keys and values a kernel may write to the cache itself."""

    def slots(self, layer: int) -> Slots | None:
        """Places of the new tokens in the cache of one layer (from 1); None if `attend` must write them."""

    def attend_written(self, layer: int, query: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        """Attend in one layer after the keys and values were written: as `Layout.attend`."""


@dataclass(frozen=True, slots=True)
class KernelAttention:
    kernel: PagedAttend
    table: Tensor
    lengths: Tensor  # [rows] int32
    longest: int
    splits: int  # parts of the keys that the kernel attends to at the same time

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        return self.kernel(query, keys, values, self.table, self.lengths, self.longest, self.splits, form).flatten(1)


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    kernel: ChunkAttend
    table: Tensor
    query_edges: Tensor  # [sequences + 1] int32, the first new token of each sequence, and their number
    key_edges: Tensor  # [sequences + 1] int32, the same for all tokens
    most: tuple[int, int]

    @classmethod
    def of(cls, chunks: PagedChunks, kernel: ChunkAttend, device: torch.device) -> ChunkAttention:
        def edges(counts: NDArray[np.int64]) -> Tensor:
            return on_device(np.concatenate(([0], counts.cumsum())).astype(np.int32))

        def on_device(values: NDArray[np.int32]) -> Tensor:
            return torch.from_numpy(values).to(device, non_blocking=True)

        # For sequences of one new token each, flash-attn would choose splits of the keys by their number.
        most = max(2, int(chunks.new.max())), int(chunks.lengths.max())
        return cls(kernel, on_device(chunks.table), edges(chunks.new), edges(chunks.lengths), most)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        edges = self.query_edges, self.key_edges
        return self.kernel(query, keys, values, self.table, *edges, self.most, form).flatten(1)
