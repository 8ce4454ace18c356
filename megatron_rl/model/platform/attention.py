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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad


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


def depths(subtree_ends: NDArray[np.int32]) -> NDArray[np.int64]:
    """Number of tokens before each packed one in its sequence, [packed], from `PackedSequences.subtree_ends`."""
    positions = np.arange(len(subtree_ends))
    ended = np.bincount(subtree_ends, minlength=len(subtree_ends) + 1).cumsum()[:-1]  # at or before each position
    return positions - ended


def widened(value: Tensor, size: int) -> Tensor:
    """Append zeros to heads, [..., value_size] -> [..., size], for kernels and memory with one size for all."""
    missing = size - value.shape[-1]
    return pad(value, (0, missing)) if missing else value


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """Attention of a layer, by its differences from causal attention with scores divided by sqrt(head_size)."""

    window: int | None = None  # tokens of its sequence that a token sees, itself included; None: all up to itself
    scale: float | None = None  # factor of the scores; None: 1 / sqrt(head_size)
    sinks: Tensor | None = None  # [heads] logits beside the scores of each head, whose share of the softmax is lost

    def factor(self, head_size: int) -> float:
        """Factor of the scores for queries and keys of this size."""
        return head_size**-0.5 if self.scale is None else self.scale

    def left(self, attended: Tensor, log_sums: Tensor) -> Tensor:
        """Take the share of the sinks from the result of attention without them.

        attended [..., heads, tokens, value_size], log_sums [..., heads, tokens]: logarithms of the sums over the
        exponentials of each token's scores -> as attended
        """
        if self.sinks is None:
            return attended
        share = (log_sums.float() - self.sinks.float()[:, None]).sigmoid()
        return attended * share[..., None].to(attended.dtype)


PLAIN = AttentionForm()


class Layout(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        """Attention of one layer (counted from 1).

        query [tokens, heads, head_size], key [tokens, kv_heads, head_size], value [tokens, kv_heads, value_size]
        -> [tokens, heads * value_size]

        For a layout of a part of the packed tokens, query and result are [part, ...].
        """
