"""Key/value cache in pages, and the two layouts that write and read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.platform.attention import Layout
from megatron_rl.platform.paged_attention import PagedAttention


class KeyValueCache:
    """keys and values, each [layers, pages, page_tokens, kv_heads, head_size]; see pages.py for whose which is.

    A place is page * page_tokens + where in the page.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_tokens: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.keys = torch.zeros(layers, pages, page_tokens, kv_heads, head_size, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Keys and values, [tokens, kv_heads, head_size], of one layer (counted from 1) to their places, [tokens]."""
        self.keys[layer - 1].flatten(0, 1).index_copy_(0, places, key)
        self.values[layer - 1].flatten(0, 1).index_copy_(0, places, value)

    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of places [tokens], each [tokens, kv_heads, head_size]."""
        keys, values = self.keys[layer - 1].flatten(0, 1), self.values[layer - 1].flatten(0, 1)
        return keys.index_select(0, places), values.index_select(0, places)


@dataclass(frozen=True, slots=True)
class PrefillLayout:
    """Attention of beginnings; what they leave behind goes to every page that begins so."""

    packed: Layout
    cache: KeyValueCache
    source: Tensor
    """[copied] packed token ..."""
    target: Tensor
    """[copied] ... and its place in the cache."""
    seen: Tensor | None
    """[seen] places that the packed tokens attend to, of one sequence after the other, their own included; None where
    they attend to one another alone."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Layout.attend`."""
        self.cache.write(layer, self.target, key.index_select(0, self.source), value.index_select(0, self.source))
        if self.seen is not None:
            key, value = self.cache.read(layer, self.seen)
        return self.packed.attend(layer, query, key, value)


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """One new token for each row."""

    cache: KeyValueCache
    target: Tensor
    """[rows] place of the new token in the cache."""
    pages: PagedAttention

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Layout.attend`."""
        self.cache.write(layer, self.target, key, value)
        return self.pages.attend(query, self.cache.keys[layer - 1], self.cache.values[layer - 1])
