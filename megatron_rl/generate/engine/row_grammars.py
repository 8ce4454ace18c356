"""The tokens that each row of a batch may draw next, for rows whose answers are forced into a grammar.

The host must see each token of such a row before the next one is drawn, so a batch with one is slower on a GPU. Batches
without any are computed as if this file did not exist.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.generate.engine.admission import Prefill
from megatron_rl.model.grammar import AnswerState, Grammars


class RowGrammars:
    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self.source: Grammars | None = None
        """Over the tokenizer's tokens. None: a request that has a grammar is refused."""
        self._vocabulary, self._device = vocabulary, device
        self._states: list[AnswerState | None] = [None] * rows
        self._allowed: Tensor | None = None  # [rows, vocabulary] bool, once there was a grammar; keeps its address

    def begin(self, rows: slice, prefills: Sequence[Prefill]) -> None:
        """Fill the rows with the samples of these prefills, one after the other."""
        if self._allowed is None and not any(prefill.grammar for prefill in prefills):
            return
        row = rows.start
        for prefill in prefills:
            for _ in prefill.samples:
                self._states[row] = None
                if prefill.grammar:
                    assert self.source is not None, "Engine.check refuses a grammar"
                    self._states[row] = self.source.begin(prefill.grammar, prefill.answer_tokens)
                row += 1
        self._write(range(rows.start, row))

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        if self._allowed is not None:
            moved = [self._states[source] for source in sources]
            for target, state in zip(targets, moved, strict=True):
                self._states[target] = state
            self._write(targets.tolist())

    def any(self, rows: slice) -> bool:
        return self._allowed is not None and any(self._states[rows])

    def take(self, rows: slice, newest: Tensor, ended: Tensor) -> None:
        """Advance behind the newest token of each row, [rows]. A row that has ended draws any token, which nobody
        reads. Waits for the device."""
        if not self.any(rows):
            return
        read = torch.stack((newest, ended.long())).tolist()
        taken = []
        for row, token, has_ended in zip(range(rows.start, rows.stop), *read, strict=True):
            state = self._states[row]
            if state is None:
                continue
            taken.append(row)
            if has_ended:
                self._states[row] = None
            else:
                state.take(token)
        self._write(taken)

    def apply(self, rows: slice, logits: Tensor) -> Tensor:
        """Return logits [rows, vocab] in fp32, with -inf for tokens that a row may not draw."""
        assert self._allowed is not None
        return logits.float().masked_fill(~self._allowed[rows], -torch.inf)

    def _write(self, rows: Sequence[int]) -> None:
        """Copy what these rows may draw to the device."""
        if not rows:
            return
        if self._allowed is None:
            shape = len(self._states), self._vocabulary
            self._allowed = torch.ones(shape, dtype=torch.bool, device=self._device)
        found = np.ones((len(rows), self._vocabulary), dtype=np.bool_)
        for row, of_row in zip(rows, found, strict=True):
            if (state := self._states[row]) is not None:
                of_row[:] = np.unpackbits(state.allowed, count=self._vocabulary, bitorder="little")
        self._allowed[torch.tensor(rows, device=self._device)] = torch.from_numpy(found).to(self._device)
