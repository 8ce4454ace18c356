"""Sequences in scattered pages, and attention to them by its formula in fp64, without pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rl.model.platform.attention import PLAIN, AttentionForm
from megatron_rl.model.platform.paged_attention import PagedRows


class Heads(NamedTuple):
    queries: int
    """A multiple of `kv`."""
    kv: int
    size: int


SMALL = Heads(4, 2, 8)


def by_formula(query: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, form: AttentionForm = PLAIN) -> Tensor:
    """[rows, heads * head_size] in fp64, row by row and head by head."""
    out = torch.empty(*query.shape, dtype=torch.float64)
    for row, length in enumerate(rows.lengths.tolist()):
        first = 0 if form.window is None else max(0, length - form.window)
        places = [(int(rows.table[row, i // rows.page_tokens]), i % rows.page_tokens) for i in range(first, length)]
        key, value = (torch.stack([each[page, :, place] for page, place in places]).double() for each in (keys, values))
        for head in range(rows.heads):
            of_head = head // (rows.heads // rows.kv_heads)
            scores = key[:, of_head] @ query[row, head].double() * form.factor(query.shape[-1])
            if form.sinks is not None:
                scores = torch.cat((scores, form.sinks[head, None].double()))
            out[row, head] = scores.softmax(0)[: len(value)] @ value[:, of_head]
    return out.flatten(1)


def pages_of(
    lengths: Sequence[int], page_tokens: int, seed: int, heads: Heads = SMALL
) -> tuple[Tensor, Tensor, Tensor, PagedRows]:
    """Query, keys, values, and rows with scattered pages, which all share the first one."""
    draw = torch.Generator().manual_seed(seed)
    width = -(-max(lengths) // page_tokens)
    table = torch.randperm(1 + len(lengths) * width, generator=draw)[: len(lengths) * width].view(len(lengths), width)
    if min(lengths) > page_tokens:
        table[:, 0] = table[0, 0]
    query = torch.randn(len(lengths), heads.queries, heads.size, generator=draw)
    keys, values = torch.randn(2, 1 + len(lengths) * width, heads.kv, page_tokens, heads.size, generator=draw)
    rows = PagedRows(table.int(), torch.tensor(lengths), np.array(lengths), page_tokens, heads.queries, heads.kv)
    return query, keys, values, rows
