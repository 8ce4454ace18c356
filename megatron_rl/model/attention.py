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
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

LONGEST_MASKED_TREE = 128
"""Tokens up to which a masked row beats one causal sequence per answer: it is quadratic in all answers together, they
pay a kernel's fixed cost each. Measured on a CPU."""


class Layout(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of one layer (counted from 1).

        query [tokens, heads, head_size], key and value [tokens, kv_heads, head_size]
        -> [tokens, heads * head_size]
        """
        ...


@dataclass(frozen=True, slots=True)
class Rotation:
    """Turns queries and keys by their positions (RoPE, arXiv 2104.09864), both at once and with the same sines in
    every layer, where megatron-core would take one after the other and compute the sines again."""

    cosines: Tensor
    """[tokens, 1, head_size]"""
    sines: Tensor
    """[tokens, 1, head_size], those of the first half negated."""

    def turn(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Each [tokens, heads, head_size]."""
        both = torch.cat((query, key), dim=1)
        half = both.shape[-1] // 2
        both = torch.addcmul(both * self.cosines, both.roll(half, dims=-1), self.sines)
        query, key = both.split((query.shape[1], key.shape[1]), dim=1)
        return query, key


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = None) -> Tensor:
    """[batch, seq, heads, head_size] -> the same; query i sees keys 0..i, or those that `visible` says."""
    out = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=visible,
        is_causal=visible is None,
        enable_gqa=True,
    )
    return out.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Tree:
    """Sequences that share beginnings, with every shared token packed once, in depth-first order."""

    first: int
    """Place of its first token."""
    length: int
    """Its tokens: the places first..first+length-1."""
    branches: list[list[int]]
    """Places from the first token to each leaf, in depth-first order."""

    @property
    def masked(self) -> bool:
        """Whether attention takes it as one row under a mask."""
        return len(self.branches) > 1 and self.length <= LONGEST_MASKED_TREE


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of one length, as places in the packed tokens."""

    rows: Tensor
    """[batch * length] index of the packed token at each place."""
    length: int
    visible: Tensor | None = None
    """[batch, 1, length, length] which keys each query sees; None: all up to itself."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Causal attention within sequences that may share packed tokens.

    Sequences are gathered into a few dense [batch, length] buckets. A sequence shorter than its bucket is
    padded at the end, where causality hides the padding from every real token; its outputs are never read.
    """

    buckets: tuple[Bucket, ...]
    outputs: Tensor
    """[tokens] where, in the concatenated bucket outputs, the result for each packed token stands."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = []
        for bucket in self.buckets:
            q, k, v = (
                x.index_select(0, bucket.rows).view(-1, bucket.length, x.shape[1], x.shape[2])
                for x in (query, key, value)
            )
            parts.append(attend(q, k, v, bucket.visible).reshape(bucket.rows.shape[0], -1))
        return torch.cat(parts).index_select(0, self.outputs)


def packed_layout(
    sequences: Sequence[Sequence[int]], tokens: int, device: torch.device, trees: Sequence[Tree] = ()
) -> PackedLayout:
    """Layout of sequences given as places of packed tokens, and of trees.

    Every packed token is in at least one of them. Lengths of sequences are rounded up to a common grid (an eighth of
    the next power of two), so that many different lengths make few buckets and less than a fifth of a bucket is
    padding. All trees make one bucket.
    """
    by_length: dict[int, list[Sequence[int]]] = defaultdict(list)
    for places in sequences:
        by_length[bucket_length(len(places))].append(places)
    dense: list[tuple[int, Sequence[Sequence[int]], Tensor | None]] = [
        (length, members, None) for length, members in sorted(by_length.items())
    ]
    if trees:
        length = max(tree.length for tree in trees)
        whole = [range(tree.first, tree.first + tree.length) for tree in trees]
        dense.append((length, whole, tree_visibility(trees, length).to(device)))
    buckets = []
    read: list[int] = []  # packed tokens ...
    places_read: list[int] = []  # ... and where their results stand
    start = 0
    for length, members, visible in dense:
        flat: list[int] = []
        for places in members:
            read.extend(places)
            # Not those of the padding, which stands for a real token but has seen all that follow it.
            places_read.extend(range(start + len(flat), start + len(flat) + len(places)))
            flat.extend(places)
            flat.extend([places[0]] * (length - len(places)))
        buckets.append(Bucket(torch.tensor(flat, dtype=torch.long, device=device), length, visible))
        start += len(flat)
    outputs = torch.empty(tokens, dtype=torch.long)
    outputs[torch.tensor(read, dtype=torch.long)] = torch.tensor(places_read, dtype=torch.long)
    return PackedLayout(tuple(buckets), outputs.to(device))


def tree_layout(trees: Sequence[Tree], tokens: int, device: torch.device) -> PackedLayout:
    """Layout of packed tokens that are trees, each attended to in the cheaper of two ways.

    A short tree is one row under a mask. In a long one most of such a row would be masked: there each branch is a
    causal sequence, for which the tokens it shares are gathered again.
    """
    sequences = [branch for tree in trees if not tree.masked for branch in tree.branches]
    return packed_layout(sequences, tokens, device, [tree for tree in trees if tree.masked])


def tree_visibility(trees: Sequence[Tree], length: int) -> Tensor:
    """[trees, 1, length, length] bool: a token sees itself and those it continues, padding at least itself.

    In depth-first order all that continue a token follow it, up to an end.
    """
    ends = [list(range(1, length + 1)) for _ in trees]
    for row, tree in zip(ends, trees, strict=True):
        for branch in tree.branches:
            for place in branch:
                row[place - tree.first] = branch[-1] + 1 - tree.first
    keys = torch.arange(length)
    queries = keys[:, None]
    return ((keys <= queries) & (queries < torch.tensor(ends)[:, None, :]))[:, None]


def bucket_length(length: int) -> int:
    grid = max(1, 2 ** (length - 1).bit_length() // 8)
    return -(-length // grid) * grid
