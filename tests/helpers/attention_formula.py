"""Attention by its formula in float64, and forms of it to test."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.model.platform.attention import PLAIN, AttentionForm, PackedSequences

DRAWS = torch.Generator()


def forms(heads: int, *, sinks: bool = True) -> st.SearchStrategy[AttentionForm]:
    """Forms with windows shorter and longer than the sequences of tests, scales, and sinks of all heads if allowed."""

    def form(window: int | None, scale: float | None, seed: int | None) -> AttentionForm:
        if seed is None:
            return AttentionForm(window, scale)
        return AttentionForm(window, scale, 2 * torch.randn(heads, generator=DRAWS.manual_seed(seed)))

    seeds = st.one_of(st.none(), st.integers(0, 99)) if sinks else st.none()
    return st.builds(form, st.sampled_from([None, 1, 2, 5, 17, 80, 1000]), st.sampled_from([None, 0.2]), seeds)


def seen_in_trees(packed: PackedSequences) -> Tensor:
    """[tokens, tokens] keys (columns) that each query sees."""
    places = torch.arange(len(packed.subtree_ends))
    return (places <= places[:, None]) & (places[:, None] < packed.subtree_ends)


def by_definition(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, form: AttentionForm = PLAIN) -> Tensor:
    """Softmax attention of query i to the keys that row i of `visible` names, all tokens, [tokens, heads *
    value_size] in float64."""
    repeats = query.shape[1] // key.shape[1]
    q, k, v = query.double(), *(each.double().repeat_interleave(repeats, dim=1) for each in (key, value))
    if form.window is not None:
        seen = visible.sum(-1)
        visible = visible & (seen[:, None] - seen < form.window)
    scores = torch.einsum("qhd,khd->hqk", q, k) * form.factor(query.shape[-1])
    scores = scores.masked_fill(~visible, -torch.inf)
    if form.sinks is not None:
        scores = torch.cat((scores, form.sinks.double()[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
