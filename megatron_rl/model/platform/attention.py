"""Packed sequences, and the interface of attention over them.

Every forward pass of the model runs on a flat list of tokens, [tokens, 1, hidden] in megatron-core's
[sequence, batch, hidden]. A *layout* knows which tokens attend to which. It travels through megatron-core as
`packed_seq_params`, and every layer calls it. Each platform has layouts of whole sequences (training, scoring, prefill)
for its own kernels; the inference engine has those of decoding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Trees of tokens, packed one after the other, on the CPU.

    A tree holds sequences with shared prefixes: every shared token once, in depth-first order. A sequence that shares
    nothing is a tree without branches. A token is visible to itself and to the tokens that continue it: query q of a
    tree sees key k if k <= q < subtree_ends[k].

    Example: the prompt [a, b] with the answers [c, d] and [e] is packed as [a, b, c, d, e] with subtree_ends
    [5, 5, 4, 4, 5].
    """

    cu_seqlens: Tensor  # [trees + 1] int32, the start of each tree, and the end
    subtree_ends: Tensor  # [packed] int32, for each token the index behind the last one that continues it


def whole_sequences(lengths: Iterable[int]) -> PackedSequences:
    edges = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return PackedSequences(edges, edges[1:].repeat_interleave(edges.diff()))


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What distinguishes the attention of a layer from causal attention with scores divided by sqrt(head_size)."""

    window: int | None = None  # tokens of its sequence that a token sees, itself included; None: all up to itself
    scale: float | None = None  # factor of the scores; None: 1 / sqrt(head_size)
    sinks: Tensor | None = None  # [heads] logits beside the scores of each head, whose share of the softmax is lost


PLAIN = AttentionForm()


class Layout(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        """Attention of one layer (counted from 1).

        query [tokens, heads, head_size], key [tokens, kv_heads, head_size], value [tokens, kv_heads, value_size]
        -> [tokens, heads * value_size]

        For a layout of a part of the packed tokens, query and result are [part, ...].
        """
