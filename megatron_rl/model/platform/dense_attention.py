"""Attention over packed sequences by dense kernels: a few [batch, length] buckets, and short trees under a mask."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from megatron_rl.model.platform.attention import PLAIN, AttentionForm, PackedSequences, widened
from megatron_rl.model.platform.host_tensors import int64

LONGEST_MASKED_TREE = 128
"""Tokens up to which a tree is one masked row instead of one causal sequence per branch. A masked row is quadratic in
all branches together, sequences have a fixed cost each. Measured on a CPU."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of one length, as indices into the packed tokens."""

    rows: Tensor  # [batch * length] indices of packed tokens
    length: int
    visible: Tensor | None = None
    """[batch, 1, length, length] keys that each query sees; None for causal attention."""


@dataclass(frozen=True, slots=True)
class FanOut:
    rows: Tensor  # [rows] index of the packed token of each row
    order: Tensor  # [rows] the rows sorted by their packed token
    counts: Tensor

    @classmethod
    def of(cls, rows: Tensor, tokens: int) -> FanOut:
        """Build on the device of `rows`. Unlike with bincount, the host does not wait."""
        counts = torch.zeros(tokens, dtype=torch.long, device=rows.device).index_add_(0, rows, torch.ones_like(rows))
        return cls(rows, rows.argsort(stable=True), counts)

    def to(self, device: torch.device) -> FanOut:
        return FanOut(
            self.rows.to(device, non_blocking=True),
            self.order.to(device, non_blocking=True),
            self.counts.to(device, non_blocking=True),
        )

    def gather(self, tokens: Tensor) -> Tensor:
        """[tokens, ...] -> [rows, ...]"""
        gathered: Tensor = _Gather.apply(tokens, self)
        return gathered


class _Gather(torch.autograd.Function):
    """index_select whose gradient of a repeated token is summed in fp32 in row order. torch's own backward on a GPU
    sums in the tensor's dtype, possibly bf16, and in any order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, fan_out: FanOut) -> Tensor:
        ctx.fan_out = fan_out
        return tokens.index_select(0, fan_out.rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        sorted_ = gradient.index_select(0, ctx.fan_out.order).flatten(1).float()
        summed = torch.segment_reduce(sorted_, "sum", lengths=ctx.fan_out.counts, initial=0.0, unsafe=True)
        return summed.to(gradient.dtype).view(-1, *gradient.shape[1:]), None


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """Causal attention within sequences that may share packed tokens.

    Sequences are gathered into a few dense [batch, length] buckets. A sequence shorter than its bucket is padded at the
    end, where causality hides the padding from every real token; outputs of the padding are not read.
    """

    buckets: tuple[Bucket, ...]
    outputs: Tensor  # [tokens] index of each packed token's result in the concatenated bucket outputs
    fan_out: FanOut | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        gathered = zip(*(self._gathered(x) for x in (query, key, value)), strict=True)
        parts = []
        for bucket, qkv in zip(self.buckets, gathered, strict=True):
            q, k, v = (x.view(-1, bucket.length, x.shape[1], x.shape[2]) for x in qkv)
            parts.append(_attend(q, k, v, bucket.visible, form).reshape(bucket.rows.shape[0], -1))
        return torch.cat(parts).index_select(0, self.outputs)

    def _gathered(self, tokens: Tensor) -> Sequence[Tensor]:
        """[tokens, heads, head_size] -> [rows, heads, head_size] for each bucket."""
        if self.fan_out is None:
            return [tokens.index_select(0, bucket.rows) for bucket in self.buckets]
        return self.fan_out.gather(tokens).split([len(bucket.rows) for bucket in self.buckets])


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, form: AttentionForm) -> Tensor:
    """[batch, seq, heads, head_size] -> [batch, seq, heads, value_size]; query i sees keys 0..i, or those in `visible`,
    as far as the window of the form reaches."""
    dtype, length = query.dtype, query.shape[1]
    if query.is_cpu:
        # torch's bf16 backward takes twice as long on a CPU. Passes without a backward convert too, so that two passes
        # at the same weights agree and their ratio is 1.
        query, key, value = query.float(), key.float(), value.float()
    if form.window is not None and form.window < length:
        if visible is None:
            visible = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril()
        depth = visible.sum(-1)
        visible = visible & (depth[..., :, None] - depth[..., None, :] < form.window)
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    return attention(query, key, value, visible, form).to(dtype).transpose(1, 2)


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, form: AttentionForm) -> Tensor:
    """Attend by torch's dense kernel, with the scale and the sinks of the form, but not its window.

    query [batch, heads, queries, head_size], key [batch, kv_heads, keys, head_size], value [batch, kv_heads, keys,
    value_size], visible [batch or 1, 1, queries, keys]; None: query i sees keys 0..i -> [batch, heads, queries,
    value_size]
    """
    size, scale = value.shape[-1], form.scale
    causal = visible is None
    if form.sinks is not None:
        # A sink is a first key with the value 0. It has its own axis, on which other keys are 0 and the queries of a
        # head have its logit, so that its score is that logit. A first query that sees it alone keeps the keys of a
        # causal query those up to itself.
        scale = form.factor(query.shape[-1])
        logits = (form.sinks.to(query.dtype) / scale)[:, None, None].expand(*query.shape[:3], 1)
        query = torch.cat((query, logits), dim=-1)
        query = pad(query, (0, 0, 1, 0)) if causal else query
        axis = torch.ones(*key.shape[:2], 1, 1, dtype=key.dtype, device=key.device)
        key = torch.cat((pad(axis, (key.shape[-1], 0)), pad(key, (0, 1))), dim=-2)
        value = pad(value, (0, 0, 1, 0))
        visible = None if visible is None else pad(visible, (1, 0), value=True)
    value = widened(value, query.shape[-1])  # two sizes would take a kernel that stores all scores
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=visible, is_causal=causal, scale=scale, enable_gqa=True
    )
    return out[..., int(causal and form.sinks is not None) :, :size]


def dense_layout(packed: PackedSequences, device: torch.device) -> DenseLayout:
    """Build the layout of packed sequences, with each tree in the cheaper of two forms.

    A short tree is one row under a mask. In a long tree most of such a row would be masked, so each branch becomes a
    causal sequence, for which shared tokens are gathered again. Lengths are rounded up to a common grid (an eighth of
    the next power of two), so that there are few buckets and less than a fifth of each is padding. All masked trees
    share one bucket.
    """
    edges, ends = packed.cu_seqlens.tolist(), packed.subtree_ends.tolist()
    by_length: dict[int, list[Sequence[int]]] = defaultdict(list)
    trees: list[range] = []
    shares = False
    for first, stop in pairwise(edges):
        if min(ends[first:stop]) == stop:
            by_length[bucket_length(stop - first)].append(range(first, stop))
        elif stop - first <= LONGEST_MASKED_TREE:
            trees.append(range(first, stop))
        else:
            shares = True
            for branch in branches(packed.subtree_ends, first, stop):
                by_length[bucket_length(len(branch))].append(branch)
    dense: list[tuple[int, Sequence[Sequence[int]], Tensor | None]] = [
        (length, members, None) for length, members in sorted(by_length.items())
    ]
    if trees:
        length = max(map(len, trees))
        dense.append((length, trees, _visibility(trees, ends, length).to(device, non_blocking=True)))
    # Example: the sequences [0, 1, 2] and [3] as buckets of lengths 3 and 1 give the results 0 1 2 | 3 and outputs
    # [0, 1, 2, 3]. In a bucket of length 4 the first would be gathered as 0 1 2 0, and its last result would not be
    # read. A token that several branches share has an equal result in each of them, and `outputs` names one.
    buckets = []
    read: list[int] = []  # packed tokens ...
    indices_read: list[int] = []  # ... and the indices of their results
    all_rows: list[int] = []
    start = 0
    for length, members, visible in dense:
        flat: list[int] = []
        for indices in members:
            read.extend(indices)
            # Skip the padding, which repeats a real token but has seen all that follow it.
            indices_read.extend(range(start + len(flat), start + len(flat) + len(indices)))
            flat.extend(indices)
            flat.extend([indices[0]] * (length - len(indices)))
        buckets.append(Bucket(int64(flat).to(device), length, visible))
        all_rows.extend(flat)
        start += len(flat)
    outputs = torch.empty(len(ends), dtype=torch.long)
    outputs[int64(read)] = int64(indices_read)
    fan_out = FanOut.of(int64(all_rows), len(ends)).to(device) if shares else None
    return DenseLayout(tuple(buckets), outputs.to(device, non_blocking=True), fan_out)


def branches(subtree_ends: Tensor, first: int, stop: int) -> list[list[int]]:
    """Paths from the first token of the tree first..stop-1 to each of its leaves, in depth-first order."""
    tokens = torch.arange(first, stop)
    ends = subtree_ends[first:stop]
    leaves = tokens[ends == tokens + 1].tolist()
    return [tokens[: leaf + 1 - first][ends[: leaf + 1 - first] > leaf].tolist() for leaf in leaves]


def _visibility(trees: Sequence[range], ends: Sequence[int], length: int) -> Tensor:
    """[trees, 1, length, length] bool: a token sees itself and those it continues; padding sees at least itself."""
    rows = [
        [end - tree.start for end in ends[tree.start : tree.stop]] + list(range(len(tree) + 1, length + 1))
        for tree in trees
    ]
    keys = torch.arange(length)
    queries = keys[:, None]
    return ((keys <= queries) & (queries < int64(rows)[:, None, :]))[:, None]


def bucket_length(length: int) -> int:
    grid = max(1, 2 ** (length - 1).bit_length() // 8)
    return -(-length // grid) * grid
