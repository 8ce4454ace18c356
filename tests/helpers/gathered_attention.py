"""Attention to a paged cache by torch's dense kernel, after its pages were gathered."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_rl.model.platform.attention import PLAIN, AttentionForm
from megatron_rl.model.platform.paged_attention import PagedRows


@dataclass(frozen=True, slots=True)
class GatheredAttention:
    parts: Tensor  # [rows * kv_heads * pages] page * kv_heads + head, in gathered order
    visible: Tensor  # [rows, 1, 1, length] gathered tokens that each row sees

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, form: AttentionForm) -> Tensor:
        assert form == PLAIN
        rows, heads, head_size = query.shape
        kv_heads, length = keys.shape[1], self.visible.shape[-1]
        keys, values = (
            each.flatten(0, 1).index_select(0, self.parts).view(rows, kv_heads, -1, head_size)[:, :, :length]
            for each in (keys, values)
        )
        # The query heads of a key/value head take the dimension of query positions: grouped-query attention without
        # repeating keys and values.
        query = query.view(rows, kv_heads, heads // kv_heads, head_size)
        out = scaled_dot_product_attention(query, keys, values, attn_mask=self.visible)
        return out.reshape(rows, heads * head_size)


def gathered_attention(rows: PagedRows) -> GatheredAttention:
    """Gather all rows up to the longest, so that the host need not know the others' lengths."""
    device = rows.table.device
    length = min(int(rows.bounds.max()), rows.table.shape[1] * rows.page_tokens)
    heads = torch.arange(rows.kv_heads, device=device)
    pages = rows.table[:, : -(-length // rows.page_tokens)]
    parts = pages[:, None] * rows.kv_heads + heads[:, None]
    visible = (torch.arange(length, device=device) < rows.lengths[:, None])[:, None, None]
    return GatheredAttention(parts.flatten(), visible)
