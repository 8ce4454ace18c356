"""States of the gated delta nets of all rows. They take the place of keys and values in the layers that have them.

A state stands for all tokens of a row up to its newest one, and cannot be taken back to an earlier token. So a sequence
is always computed from its first token on: no page of the cache is shared with later sequences, and no prompt is
computed in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_rl.generate.engine.admission import Prefill
from megatron_rl.model.delta_net import GatedDelta
from megatron_rl.model.platform.attention import AttentionForm, Layout
from megatron_rl.model.platform.delta_rule import ConsecutiveSequences
from megatron_rl.model.platform.paths import DeltaState, Recurrence, RecurrentLayout
from megatron_rl.model.policy import Policy


class DeltaStates:
    """The states of this rank's heads."""

    def __init__(self, policy: Policy, rows: int) -> None:
        layers = [layer.self_attention for layer in policy.decoder.layers]
        self._nets = [layer for layer in layers if isinstance(layer, GatedDelta)]
        self._rows = rows
        self.of_layer: dict[int, DeltaState] = {}
        """State of each layer, counted from 1, whose sequences are the rows; empty until a row begins."""
        attending = [layer.layer_number for layer in layers if not isinstance(layer, GatedDelta)]
        self.cached = {number: place for place, number in enumerate(attending, start=1)}
        """Place of each layer with attention in the cache, from 1."""
        self._device = policy.device

    def release(self) -> None:
        """Free the states. No row may be in use."""
        self.of_layer = {}

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy rows: (from, to) each."""
        source, target = torch.tensor(moves, device=self._device).unbind(1)
        for state in self.of_layer.values():
            for each in (state.history, state.memory):
                each.index_copy_(0, target, each.index_select(0, source))

    def begin(self, attention: Layout, prefills: Sequence[Prefill], rows: slice) -> RecurrentLayout:
        """Layout of whole sequences, which the samples of each prefill start with in these rows."""
        self.of_layer = self.of_layer or {net.layer_number: net.empty_state(self._rows) for net in self._nets}
        samples = [len(prefill.samples) for prefill in prefills]
        of_rows = torch.from_numpy(np.repeat(np.arange(len(samples)), samples)).to(self._device, non_blocking=True)
        sequences = ConsecutiveSequences([len(each.tokens) for each in prefills], self._device)
        return StatefulLayout(attention, self, sequences, rows, of_rows)

    def continued(self, attention: Layout, rows: slice) -> RecurrentLayout:
        """Layout of the next token of each of these rows."""
        sequences = ConsecutiveSequences([1] * (rows.stop - rows.start), self._device, chunk=1)
        return StatefulLayout(attention, self, sequences, rows, None)


@dataclass(frozen=True, slots=True)
class StatefulLayout(RecurrentLayout):
    attention: Layout
    states: DeltaStates
    sequences: ConsecutiveSequences
    rows: slice
    of_rows: Tensor | None  # [rows] sequence whose state each row gets; None: each row's own token follows its state

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *form: AttentionForm) -> Tensor:
        return self.attention.attend(self.states.cached[layer], query, key, value, *form)

    def recur(self, layer: int, tokens: Tensor, recurrence: Recurrence) -> Tensor:
        state = self.states.of_layer[layer]
        history, memory = state.history[self.rows], state.memory[self.rows]
        out, left = recurrence(tokens, self.sequences, DeltaState(history, memory) if self.of_rows is None else None)
        for kept, new in ((history, left.history), (memory, left.memory)):
            kept.copy_(new if self.of_rows is None else new.index_select(0, self.of_rows))
        return out
