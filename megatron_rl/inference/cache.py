"""Key/value cache in pages, and the two layouts that write and read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.platform.attention import Layout
from megatron_rl.platform.paged_attention import PagedAttention


class KeyValueCache:
    """keys and values, each [layers, pages, page_tokens, kv_heads, head_size]; where pages are gathered (see
    `Platform.gathers_pages`) [layers, pages, kv_heads, page_tokens, head_size]. See pages.py for whose which is.

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
        gathered: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        of_page = (kv_heads, page_tokens) if gathered else (page_tokens, kv_heads)
        both = torch.zeros(layers, 2, pages, *of_page, head_size, dtype=dtype, device=device)
        self.keys, self.values = both.unbind(1)
        self._page_tokens = page_tokens
        self._gathered = gathered
        # Of all layers, as what is copied at once: the keys or values of a token, or of one of its heads.
        self._copied = both.flatten(1, 4 if gathered else 3)
        self._first_value = self._copied.shape[1] // 2
        self._heads = torch.arange(kv_heads, device=device)

    def index(self, places: Tensor) -> Tensor:
        """What `write` and `read` want to know of places [tokens]."""
        if self._gathered:
            page, place = places // self._page_tokens, places % self._page_tokens
            of_heads = (page[:, None] * len(self._heads) + self._heads) * self._page_tokens + place[:, None]
            places = of_heads.flatten()
        return torch.cat((places, places + self._first_value))

    def write(self, layer: int, index: Tensor, key: Tensor, value: Tensor) -> None:
        """Keys and values, [tokens, kv_heads, head_size], of one layer (counted from 1) to their places."""
        both = torch.cat((key, value)).to(self._copied.dtype)
        self._copied[layer - 1].index_copy_(0, index, both.flatten(0, 1) if self._gathered else both)

    def read(self, layer: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of places, each [tokens, kv_heads, head_size]."""
        both = self._copied[layer - 1].index_select(0, index).view(-1, len(self._heads), self.keys.shape[-1])
        key, value = both.chunk(2)
        return key, value


@dataclass(frozen=True, slots=True)
class PrefillLayout:
    """Attention of beginnings; what they leave behind goes to every page that begins so."""

    packed: Layout
    cache: KeyValueCache
    source: Tensor
    """[copied] packed token ..."""
    target: Tensor
    """... and where in the cache it is copied to, see `KeyValueCache.index`."""
    seen: Tensor | None
    """Where that is which the packed tokens attend to, of one sequence after the other, their own included; None where
    they attend to one another alone."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Layout.attend`."""
        self.cache.write(layer, self.target, key.index_select(0, self.source), value.index_select(0, self.source))
        if self.seen is not None:
            key, value = (each.to(query.dtype) for each in self.cache.read(layer, self.seen))
        return self.packed.attend(layer, query, key, value)


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """One new token for each row."""

    cache: KeyValueCache
    target: Tensor
    """Where in the cache the new tokens go, see `KeyValueCache.index`."""
    pages: PagedAttention

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Layout.attend`."""
        self.cache.write(layer, self.target, key, value)
        return self.pages.attend(query, self.cache.keys[layer - 1], self.cache.values[layer - 1])
