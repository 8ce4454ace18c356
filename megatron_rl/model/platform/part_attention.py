"""Attention of a part of the packed tokens to all that they see, by dense kernels under masks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_rl.model.platform.attention import PLAIN, AttentionForm, PackedSequences, depths
from megatron_rl.model.platform.dense_attention import LONGEST_MASKED_TREE, FanOut, attention, branches, bucket_length


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries with a common list of keys. Each query sees some of them."""

    queries: Tensor  # [queries] indices into the part
    keys: Tensor  # [keys] packed tokens in ascending order


@dataclass(frozen=True, slots=True)
class QueryBuckets:
    queries: Tensor  # [rows, queries] indices into the part
    keys: Tensor  # [rows, keys] packed tokens
    visible: Tensor  # [rows, 1, queries, keys] keys that each query sees
    query_depths: Tensor  # [rows, queries] tokens before each in its sequence
    key_depths: Tensor  # [rows, keys]

    def within(self, window: int | None) -> Tensor:
        """Restrict `visible` to a window."""
        if window is None:
            return self.visible
        distance = self.query_depths[:, :, None] - self.key_depths[:, None]
        return self.visible & (distance < window)[:, None]


@dataclass(frozen=True, slots=True)
class PartLayout:
    buckets: tuple[QueryBuckets, ...]
    outputs: Tensor  # [part] index of each token's result in the concatenated bucket outputs
    keys: FanOut  # keys of all buckets: late queries also attend to the keys of early ones

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        sizes = [bucket.keys.numel() for bucket in self.buckets]
        gathered = zip(*(self.keys.gather(x).split(sizes) for x in (key, value)), strict=True)
        parts = []
        for bucket, (k, v) in zip(self.buckets, gathered, strict=True):
            attended = attention(
                query.index_select(0, bucket.queries.flatten()).unflatten(0, bucket.queries.shape).transpose(1, 2),
                k.unflatten(0, bucket.keys.shape).transpose(1, 2),
                v.unflatten(0, bucket.keys.shape).transpose(1, 2),
                bucket.within(form.window),
                form,
            )
            parts.append(attended.transpose(1, 2).flatten(0, 1).flatten(1))
        return torch.cat(parts).index_select(0, self.outputs)


def part_layout(packed: PackedSequences, part: Tensor, device: torch.device) -> PartLayout:
    """Build the layout of the packed tokens `part`, [part], ascending, at least one.

    Lengths are rounded up to the grid of `bucket_length`, so that there are few buckets. Short trees share one.
    """
    by_size: dict[tuple[int, int], list[QueryBlock]] = defaultdict(list)
    short: list[QueryBlock] = []
    edges = torch.searchsorted(part, packed.cu_seqlens.long()).tolist()
    for (first, stop), (begin, end) in zip(pairwise(packed.cu_seqlens.tolist()), pairwise(edges), strict=True):
        if begin == end:
            continue
        if stop - first <= LONGEST_MASKED_TREE:
            short.append(QueryBlock(torch.arange(begin, end), torch.arange(first, int(part[end - 1]) + 1)))
        else:
            for row in query_blocks(packed.subtree_ends, first, stop, part):
                by_size[bucket_length(len(row.queries)), bucket_length(len(row.keys))].append(row)
    sized = sorted(by_size.items())
    if short:
        sized.append(((max(len(row.queries) for row in short), max(len(row.keys) for row in short)), short))
    buckets, outputs, start = [], torch.empty(len(part), dtype=torch.long), 0
    depth = torch.from_numpy(depths(packed.subtree_ends.numpy()))
    for (queries, keys), members in sized:
        for number, row in enumerate(members):
            outputs[row.queries] = torch.arange(len(row.queries)) + start + number * queries
        start += queries * len(members)
        buckets.append(_bucket(members, (queries, keys), (packed.subtree_ends, depth), part, device))
    fan_out = FanOut.of(torch.cat([bucket.keys.flatten() for bucket in buckets]), len(packed.subtree_ends))
    return PartLayout(tuple(buckets), outputs.to(device, non_blocking=True), fan_out)


def query_blocks(subtree_ends: Tensor, first: int, stop: int, part: Tensor) -> Iterator[QueryBlock]:
    """Split the `part` of the tree first..stop-1 into runs of consecutive tokens of a branch, each token once. The keys
    of a run are the branch up to its last token, so its queries are its last keys, and its mask is a causal one aligned
    at the end, which kernels for different lengths of queries and keys support without a mask."""
    # Example: the prompt [0, 1] with the answers [2, 3] and [4], and the part [1, 3, 4]. Branch 0 1 2 3 gives the runs
    # [1] with keys 0 1 and [3] with keys 0 1 2 3; branch 0 1 4 has token 1 again, which is done, and gives [4] with
    # keys 0 1 4. In depth-first order the shared tokens of a branch are all at or before the last token of the previous
    # branch, so one number suffices to know what is done.
    before = first - 1
    for branch in branches(subtree_ends, first, stop):
        path = torch.tensor(branch)
        found = torch.searchsorted(part, path)
        mine = (part[found.clamp(max=len(part) - 1)] == path) & (path > before)
        before = branch[-1]
        steps = mine.nonzero()[:, 0]
        for run in steps.tensor_split((steps.diff() > 1).nonzero()[:, 0] + 1):
            if len(run):
                yield QueryBlock(found[run], path[: run[-1] + 1])


def _bucket(
    members: list[QueryBlock],
    lengths: tuple[int, int],
    of_tokens: tuple[Tensor, Tensor],
    part: Tensor,
    device: torch.device,
) -> QueryBuckets:
    """Pad blocks with their first query, whose results are not read, and with keys that no query sees.

    lengths: queries and keys of a row. of_tokens: end of the subtree and depth of each packed token.
    """
    nowhere = len(of_tokens[0])
    of_rows = torch.stack([_filled(row.queries, lengths[0], int(row.queries[0])) for row in members])
    of_keys = torch.stack([_filled(row.keys, lengths[1], nowhere) for row in members]).to(device, non_blocking=True)
    ends, depth = (torch.cat((each, each.new_zeros(1))).to(device, non_blocking=True) for each in of_tokens)
    places = part[of_rows].to(device, non_blocking=True)
    at = places[:, :, None]
    visible = (of_keys[:, None] <= at) & (at < ends[of_keys][:, None])
    return QueryBuckets(
        of_rows.to(device, non_blocking=True),
        torch.where(of_keys == nowhere, 0, of_keys),
        visible[:, None],
        depth[places],
        depth[of_keys],
    )


def _filled(values: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)), value=value)
