"""Core attention over packed tokens: no padding outside attention, no mask, shared prompts computed once.

Every forward of the model runs on a flat list of tokens, [tokens, 1, hidden] in megatron-core's
[sequence, batch, hidden]. Who attends to whom is the business of a *layout* that travels through
megatron-core as `packed_seq_params` and is called by every layer:

    PackedLayout   whole sequences: training, scoring, prefill
    CacheLayout    one new token per sequence against a key/value cache: decoding (inference/cache.py)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Layout(Protocol):
    qkv_format: str
    """Read by megatron-core: anything but `thd` leaves [tokens, 1, heads, head_size] as they are."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of one layer (counted from 1).

        query [tokens, heads, head_size], key and value [tokens, kv_heads, head_size]
        -> [tokens, heads * head_size]
        """
        ...


class CoreAttention(torch.nn.Module):
    """Fills the `core_attention` slot of megatron-core's SelfAttention."""

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.layer = layer_number

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        /,
        *,
        packed_seq_params: Layout,
        **_: Any,
    ) -> Tensor:
        out = packed_seq_params.attend(self.layer, query.squeeze(1), key.squeeze(1), value.squeeze(1))
        return out.unsqueeze(1)


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[batch, seq, heads, head_size] -> the same; query i sees keys 0..i."""
    out = scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of one length, as places in the packed tokens."""

    rows: Tensor
    """[batch * length] index of the packed token at each place."""
    length: int


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Causal attention within sequences that may share packed tokens.

    Sequences are gathered into a few dense [batch, length] buckets. A sequence shorter than its bucket is
    padded at the end, where causality hides the padding from every real token; its outputs are never read.
    """

    buckets: tuple[Bucket, ...]
    outputs: Tensor
    """[tokens] where, in the concatenated bucket outputs, the result for each packed token stands."""
    qkv_format: str = "sbhd"

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = []
        for bucket in self.buckets:
            q, k, v = (
                x.index_select(0, bucket.rows).view(-1, bucket.length, x.shape[1], x.shape[2])
                for x in (query, key, value)
            )
            parts.append(attend_causally(q, k, v).reshape(bucket.rows.shape[0], -1))
        return torch.cat(parts).index_select(0, self.outputs)


def packed_layout(sequences: Sequence[Sequence[int]], tokens: int, device: torch.device) -> PackedLayout:
    """Layout of sequences given as places of packed tokens; every packed token is in at least one of them.

    Lengths are rounded up to a common grid (an eighth of the next power of two), so that many different
    lengths make few buckets and less than a fifth of a bucket is padding.
    """
    by_length: dict[int, list[Sequence[int]]] = defaultdict(list)
    for places in sequences:
        by_length[bucket_length(len(places))].append(places)
    buckets = []
    read: list[int] = []  # packed tokens ...
    places_read: list[int] = []  # ... and where their results stand
    start = 0
    for length, members in sorted(by_length.items()):
        flat: list[int] = []
        for places in members:
            read.extend(places)
            # Not those of the padding, which stands for a real token but has seen all that follow it.
            places_read.extend(range(start + len(flat), start + len(flat) + len(places)))
            flat.extend(places)
            flat.extend([places[0]] * (length - len(places)))
        buckets.append(Bucket(torch.tensor(flat, dtype=torch.long, device=device), length))
        start += len(flat)
    outputs = torch.empty(tokens, dtype=torch.long)
    outputs[torch.tensor(read, dtype=torch.long)] = torch.tensor(places_read, dtype=torch.long)
    return PackedLayout(tuple(buckets), outputs.to(device))


def bucket_length(length: int) -> int:
    grid = max(1, 2 ** (length - 1).bit_length() // 8)
    return -(-length // grid) * grid
