"""Key/value cache in rows, and the two layouts that write and read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_rl.platform.attention import Layout


class KeyValueCache:
    """keys and values, each [layers, rows, length, kv_heads, head_size]; one row per sequence being decoded."""

    def __init__(
        self,
        *,
        layers: int,
        rows: int,
        length: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.keys = torch.zeros(layers, rows, length, kv_heads, head_size, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.length = length

    def move(self, source: Tensor, target: Tensor, *, length: int) -> None:
        """Copy the first `length` places of the rows `source` to the rows `target`."""
        self.keys[:, target, :length] = self.keys[:, source, :length]
        self.values[:, target, :length] = self.values[:, source, :length]


@dataclass(frozen=True, slots=True)
class PrefillLayout:
    """Attention of whole prompts; what they leave behind goes to every row that continues them."""

    packed: Layout
    cache: KeyValueCache
    source: Tensor
    """[copied] packed token ..."""
    target: Tensor
    """[copied] ... and its place, row * length + position, in the cache."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.cache.keys[layer - 1].flatten(0, 1).index_copy_(0, self.target, key.index_select(0, self.source))
        self.cache.values[layer - 1].flatten(0, 1).index_copy_(0, self.target, value.index_select(0, self.source))
        return self.packed.attend(layer, query, key, value)


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """One new token for each of the first rows of the cache."""

    cache: KeyValueCache
    target: Tensor
    """[rows] place, row * length + position, of the new token in the cache."""
    length: int
    """Longest sequence, the new token included."""
    visible: Tensor | None
    """[rows, 1, 1, length] which cached tokens each row may see; None where all rows are equally long."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, head_size = query.shape
        keys, values = self.cache.keys[layer - 1], self.cache.values[layer - 1]
        keys.flatten(0, 1).index_copy_(0, self.target, key)
        values.flatten(0, 1).index_copy_(0, self.target, value)
        # The query heads that share a key/value head stand in for query positions: grouped-query attention
        # without repeating keys and values.
        out = scaled_dot_product_attention(
            query.view(rows, key.shape[1], heads // key.shape[1], head_size),
            keys[:rows, : self.length].transpose(1, 2),
            values[:rows, : self.length].transpose(1, 2),
            attn_mask=self.visible,
        )
        return out.reshape(rows, heads * head_size)
