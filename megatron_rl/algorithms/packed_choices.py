"""The engine's choices of experts for the tokens of micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl.model.choice_form import ChoiceForm
from megatron_rl.model.choices import Choices


@dataclass(frozen=True, slots=True)
class PackedChoices:
    """Choices of the tokens of a micro-batch, on the CPU."""

    given: Tensor  # [packed, layers, chosen] uint8 or int16
    known: Tensor  # [packed] bool; what is given for the others means nothing

    @classmethod
    def none(cls, tokens: int, form: ChoiceForm) -> PackedChoices:
        return cls(_tensor(np.zeros((tokens, form.numbers), form.dtype), form), torch.zeros(tokens, dtype=torch.bool))

    def at(self, indices: Tensor) -> PackedChoices:
        """Choices of some packed tokens, of which those behind the last one are padding."""
        behind = max(0, int(indices.max()) + 1 - len(self.known))
        return PackedChoices(pad(self.given, (0, 0, 0, 0, 0, behind))[indices], pad(self.known, (0, behind))[indices])

    @property
    def missing(self) -> int:
        return len(self.known) - int(self.known.sum())


@dataclass(frozen=True, slots=True)
class ChoiceTable:
    """Choices of all tokens of a batch, one sequence after the other."""

    form: ChoiceForm
    rows: NDArray[Any]  # [tokens, numbers]
    known: NDArray[np.bool_]  # [tokens]

    @classmethod
    def of(cls, form: ChoiceForm, choices: Sequence[Choices], lengths: Sequence[int]) -> ChoiceTable:
        """lengths: of the sequences. Raises ValueError for choices that the model cannot make."""
        return cls(form, *form.table(choices, lengths))

    def packed(
        self, sources: NDArray[np.int64], paths: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]]
    ) -> PackedChoices:
        """Return the choices of packed tokens.

        sources: [packed] the token of the batch that each of them is.
        paths: for each sequence, indices of its packed tokens, and of the same tokens of the batch. A token that
            several sequences share is packed as the first one's. It has that one's choices, or else those of a sequence
            that knows them.
        """
        # Two answers may disagree about their prompt, if two replicas computed it, or one under two versions. The
        # difference is that of two passes over the same tokens. Respecting it would take a pass over the prompt for
        # each answer, which costs more than it gains.
        rows, known = self.rows[sources], self.known[sources]
        if not known.all():
            for packed, own in paths:
                filled = ~known[packed] & self.known[own]
                rows[packed[filled]], known[packed[filled]] = self.rows[own[filled]], True
        return PackedChoices(_tensor(rows, self.form), torch.from_numpy(known))


def _tensor(rows: NDArray[Any], form: ChoiceForm) -> Tensor:
    """[tokens, numbers] -> [tokens, layers, chosen]"""
    small = torch.from_numpy(rows.view(np.int16 if form.dtype.itemsize == 2 else np.uint8))
    return small.unflatten(1, (len(form.layers), form.chosen))
