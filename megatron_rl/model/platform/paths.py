"""Packed trees for layers that read a sequence from its first token on, as a gated delta net does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.model.platform.attention import AttentionForm, Layout, PackedSequences
from megatron_rl.model.platform.delta_rule import ConsecutiveSequences
from megatron_rl.model.platform.dense_attention import FanOut, branches


@dataclass(frozen=True, slots=True)
class DeltaState:
    """A gated delta net behind some tokens of each sequence."""

    history: Tensor  # [sequences, kernel - 1, channels] last inputs of the convolution
    memory: Tensor  # [sequences, heads, key_size, value_size] fp32


Recurrence = Callable[[Tensor, ConsecutiveSequences, DeltaState | None], tuple[Tensor, DeltaState]]
"""Computes tokens [tokens, ...] of sequences from the states before them (None: at the start) -> [tokens, outputs], and
the states behind them."""


class RecurrentLayout(Layout, Protocol):
    def recur(self, layer: int, tokens: Tensor, recurrence: Recurrence) -> Tensor:
        """Compute one layer (counted from 1), [tokens, ...] -> [tokens, outputs].

        For a layout of a part of the packed tokens, `tokens` are all of them, and so is the result.
        """


@dataclass(frozen=True, slots=True)
class SharedTokens:
    fan_out: FanOut
    outputs: Tensor  # [tokens] row of the first path that has each packed token


@dataclass(frozen=True, slots=True)
class Paths:
    """Every path of packed trees, from the root to a leaf, as a sequence: a recurrence that follows one path
    cannot follow the next from where they part."""

    sequences: ConsecutiveSequences
    shared: SharedTokens | None  # None if the paths are the packed tokens

    @classmethod
    def of(cls, packed: PackedSequences, device: torch.device) -> Paths:
        ends = packed.subtree_ends
        found = [path for first, stop in pairwise(packed.cu_seqlens.tolist()) for path in branches(ends, first, stop)]
        sequences = ConsecutiveSequences([len(path) for path in found], device)
        rows = torch.tensor([token for path in found for token in path])
        if len(rows) == len(ends):
            return cls(sequences, None)
        # The gradient of a shared token's own result goes to one path, those of what follows it to all. Written from
        # the last path to the first, so that the first one remains.
        outputs = torch.empty(len(ends), dtype=torch.long)
        outputs[rows.flip(0)] = torch.arange(len(rows)).flip(0)
        shared = SharedTokens(FanOut.of(rows, len(ends)).to(device), outputs.to(device, non_blocking=True))
        return cls(sequences, shared)


@dataclass(frozen=True, slots=True)
class PathLayout(RecurrentLayout):
    """The attention of a layout, and recurrences along all paths of the packed trees."""

    attention: Layout
    paths: Paths

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *form: AttentionForm) -> Tensor:
        return self.attention.attend(layer, query, key, value, *form)

    def recur(self, layer: int, tokens: Tensor, recurrence: Recurrence) -> Tensor:
        shared = self.paths.shared
        if shared is None:
            return recurrence(tokens, self.paths.sequences, None)[0]
        out, _ = recurrence(shared.fan_out.gather(tokens), self.paths.sequences, None)
        return out.index_select(0, shared.outputs)
