"""Experts chosen for the tokens in the cache, in the slots of their keys and values: sequences that share pages share
them, and a prefix that is found in the cache has those of the pass that computed it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.model.choice_form import ChoiceForm
from megatron_rl.model.choices import Choices
from megatron_rl.model.router_replay import RecordedChoices


class ChoiceCache:
    def __init__(self, form: ChoiceForm, pages: int, page_tokens: int, device: torch.device) -> None:
        self._form, self._page_tokens = form, page_tokens
        dtype = torch.uint8 if form.dtype.itemsize == 1 else torch.int16
        self._table = torch.zeros(pages * page_tokens, len(form.layers), form.chosen, dtype=dtype, device=device)
        self._columns = {layer: column for column, layer in enumerate(form.layers)}

    def recorder(self, target: Tensor, source: Tensor | None = None) -> RecordedChoices:
        """Return a replay that records a pass. target: slots. source: the token of each; None: the first tokens."""
        return RecordedChoices(self._table, self._columns, target, source)

    def read(self, pages: Tensor, first: NDArray[Any], stop: NDArray[Any]) -> Sequence[Choices]:
        """Return the choices of rows' tokens from `first` to `stop`, [rows] each.

        pages: [rows, pages] of each row, from its first token.
        """
        counts = (stop - first).clip(min=0)
        row = np.repeat(np.arange(len(first)), counts)
        token = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts - first, counts)
        page, offset = np.divmod(token, self._page_tokens)
        index = (torch.from_numpy(each).to(pages.device) for each in (row, page, offset))
        rows, pages_of_tokens, offsets = index
        slots = pages[rows, pages_of_tokens].long() * self._page_tokens + offsets
        found = self._form.listed(self._table[slots].flatten(1).numpy(force=True))
        edges = [0, *counts.cumsum().tolist()]
        return [found[begin:end] for begin, end in pairwise(edges)]
