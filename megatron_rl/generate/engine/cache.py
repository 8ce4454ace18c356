"""Paged key/value cache, and the attention layouts that write and read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.model.platform.attention import PLAIN, AttentionForm, Layout, widened
from megatron_rl.model.platform.layer_kernels import Slots
from megatron_rl.model.platform.paged_attention import PagedAttention


@dataclass(frozen=True, slots=True)
class CacheShape:
    layers: int
    pages: int
    page_tokens: int
    kv_heads: int
    head_size: int  # of queries and keys; smaller heads of values take the same room
    gathered: bool


class KeyValueCache:
    """keys and values, each [layers, pages, page_tokens, kv_heads, head_size], or, if pages are gathered (see
    `Kernels.gathers_pages`), [layers, pages, kv_heads, page_tokens, head_size]. pages.py assigns the pages.

    The slot of a token is page * page_tokens + its offset in the page.
    """

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        kv_heads, page_tokens, gathered = shape.kv_heads, shape.page_tokens, shape.gathered
        of_page = (kv_heads, page_tokens) if gathered else (page_tokens, kv_heads)
        both = torch.zeros(shape.layers, 2, shape.pages, *of_page, shape.head_size, dtype=dtype, device=device)
        self.keys, self.values = both.unbind(1)
        self._page_tokens = page_tokens
        self._gathered = gathered
        # [layers, chunks, ...]: a chunk is the keys or the values of one token, or of one head of it if gathered.
        self._copied = both.flatten(1, 4 if gathered else 3)
        self._first_value = self._copied.shape[1] // 2
        self._heads = torch.arange(kv_heads, device=device)

    def index(self, slots: Tensor) -> Tensor:
        """Return the chunks of the slots [tokens], for `write` and `read`."""
        if self._gathered:
            page, offset = slots // self._page_tokens, slots % self._page_tokens
            of_heads = (page[:, None] * len(self._heads) + self._heads) * self._page_tokens + offset[:, None]
            slots = of_heads.flatten()
        return torch.cat((slots, slots + self._first_value))

    def slots(self, layer: int, index: Tensor) -> Slots | None:
        """Return the places of the chunks `index` in one layer (from 1); None if a place has only one head."""
        if self._gathered:
            return None
        keys, values = self.keys[layer - 1], self.values[layer - 1]
        return Slots(keys.flatten(0, 1), values.flatten(0, 1), index[: len(index) // 2])

    def write(self, layer: int, index: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys, [tokens, kv_heads, head_size], and values, [tokens, kv_heads, value_size], of one layer (from 1)
        to the chunks `index`."""
        both = torch.cat((key, widened(value, key.shape[-1]))).to(self._copied.dtype)
        self._copied[layer - 1].index_copy_(0, index, both.flatten(0, 1) if self._gathered else both)

    def read(self, layer: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the chunks `index`, each [tokens, kv_heads, head_size]: values may end with
        zeros."""
        both = self._copied[layer - 1].index_select(0, index).view(-1, len(self._heads), self.keys.shape[-1])
        key, value = both.chunk(2)
        return key, value


@dataclass(frozen=True, slots=True)
class PrefillLayout:
    """Attention of a prefill, which also copies its keys and values to every page that needs them."""

    packed: Layout
    cache: KeyValueCache
    source: Tensor
    target: Tensor
    seen: Tensor | None
    """Chunks that the packed tokens attend to, sequence by sequence, including their own. None: the tokens attend
    only to one another."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        self.cache.write(layer, self.target, key.index_select(0, self.source), value.index_select(0, self.source))
        size = value.shape[-1]
        if self.seen is not None:
            key, value = (each.to(query.dtype) for each in self.cache.read(layer, self.seen))
        return self.packed.attend(layer, query, key, value[..., :size], form)


@dataclass(frozen=True, slots=True)
class ContinuedLayout:
    """Attention of a prefill with earlier tokens of some sequences, by a kernel that reads the cache in place."""

    cache: KeyValueCache
    source: Tensor
    target: Tensor
    pages: PagedAttention

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        self.cache.write(layer, self.target, key.index_select(0, self.source), value.index_select(0, self.source))
        attended = self.pages.attend(query, self.cache.keys[layer - 1], self.cache.values[layer - 1], form)
        return narrowed(attended, query, value)


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    cache: KeyValueCache
    target: Tensor
    pages: PagedAttention

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        self.cache.write(layer, self.target, key, value)
        return narrowed(self.attend_written(layer, query, form), query, value)

    def slots(self, layer: int) -> Slots | None:
        return self.cache.slots(layer, self.target)

    def attend_written(self, layer: int, query: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        return self.pages.attend(query, self.cache.keys[layer - 1], self.cache.values[layer - 1], form)


def narrowed(attended: Tensor, query: Tensor, value: Tensor) -> Tensor:
    """Cut the result of heads that were widened to the size of the keys, [tokens, heads * head_size] -> [tokens, heads
    * value_size]."""
    size = value.shape[-1]
    return attended if size == query.shape[-1] else attended.view(query.shape)[..., :size].flatten(1)
