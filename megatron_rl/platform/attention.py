"""What attention is asked for: packed sequences, and who attends to whom in them.

Every forward of the model runs on a flat list of tokens, [tokens, 1, hidden] in megatron-core's
[sequence, batch, hidden]. Who attends to whom is the business of a *layout* that travels through megatron-core as
`packed_seq_params` and is called by every layer. Each platform makes layouts of whole sequences (training, scoring,
prefill) for its own kernels; those of decoding are the inference engine's.
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
    """Trees of tokens, packed one after the other. All of it lies on the CPU.

    A tree is sequences that share beginnings, with every shared token packed once, in depth-first order; a sequence
    that shares nothing is a tree without branches. A token is seen by itself and by those that continue it: query q of
    a tree sees key k where k <= q < subtree_ends[k].
    """

    cu_seqlens: Tensor
    """[trees + 1] int32, where each tree begins, and the end."""
    subtree_ends: Tensor
    """[packed] int32, for each token the place behind the last one that continues it."""


def whole_sequences(lengths: Iterable[int]) -> PackedSequences:
    """Sequences of these lengths that share nothing."""
    edges = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return PackedSequences(edges, edges[1:].repeat_interleave(edges.diff()))


class Layout(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of one layer (counted from 1).

        query [tokens, heads, head_size], key and value [tokens, kv_heads, head_size]
        -> [tokens, heads * head_size]

        Of a layout for a part of the packed tokens query and result are [part, ...].
        """
        ...
