"""The likeliest tokens of each place, for the rows whose requests ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.inference.api import MOST_TOP_LOGPROBS, PromptScores, TopLogprobs


class TopLogprobsRows:
    """What rows have of the newest places: the host reads them each time it looks."""

    def __init__(self, rows: int, places: int, vocab: int, device: torch.device) -> None:
        """places: most tokens of a row from one synchronisation of host and device to the next."""
        self._asked = np.zeros(rows, dtype=np.int64)
        self._places = places
        self._most = min(MOST_TOP_LOGPROBS, vocab)
        shape = rows, places, self._most
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(shape, device=device)

    def set(self, rows: slice, asked: int) -> None:
        self._asked[rows] = min(asked, self._most)

    def move(self, sources: list[int], targets: list[int], source: Tensor, target: Tensor) -> None:
        """Copy the rows `sources` to the rows `targets`, which the tensors name on the device."""
        if self._asked[sources].any():
            self._tokens[target] = self._tokens[source]
            self._logprobs[target] = self._logprobs[source]
        self._asked[targets] = self._asked[sources]

    def most(self, rows: slice) -> int:
        """How many any of these rows asks for."""
        return int(self._asked[rows].max())

    def record(self, rows: slice, count: Tensor, logits: Tensor, temperature: Tensor, most: int) -> None:
        """Note so many of the likeliest tokens of the next place of these rows.

        count [rows] answer tokens before it; logits [rows, vocab]; temperature [rows], of which 0 counts as 1.
        """
        if not most:
            return
        temperature = temperature.masked_fill(temperature == 0, 1.0)
        logprobs = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
        # Of equally likely ones, which are found first depends on how many are asked for: always as many.
        values, tokens = (each[:, :most] for each in logprobs.topk(self._most))
        place = (count % self._places)[:, None, None].expand(-1, 1, values.shape[1])
        self._tokens[rows].scatter_(1, place, tokens[:, None].int())
        self._logprobs[rows].scatter_(1, place, values[:, None])

    def columns(self, rows: Sequence[int], index: Tensor, places: Tensor) -> list[Tensor]:
        """What there is at these places, each [rows, places * likeliest] of 32 bits; nothing where no row asks.

        index [rows] those rows, on the device; places [rows, places] of their answers.
        """
        most = int(self._asked[rows].max())
        if not most:
            return []
        at = index[:, None], places % self._places
        return [each[at][..., :most].flatten(1).view(torch.int32) for each in (self._tokens, self._logprobs)]

    def parse(self, rows: Sequence[int], read: NDArray[np.int32], places: int) -> list[list[TopLogprobs] | None]:
        """Of each row what `columns` gave, read [rows, 2 * places * likeliest]; None of those that did not ask."""
        asked = self._asked[rows].tolist()
        if not max(asked):
            return [None] * len(asked)
        tokens, logprobs = read.reshape(len(asked), 2, places, max(asked)).swapaxes(0, 1)
        return [
            [
                dict(zip(row_tokens[place, :count].tolist(), row_logprobs[place, :count].tolist(), strict=True))
                for place in range(places)
            ]
            if count
            else None
            for count, row_tokens, row_logprobs in zip(asked, tokens, logprobs.view(np.float32), strict=True)
        ]


def prompt_scores(logits: Tensor, targets: Tensor, most: int) -> PromptScores:
    """Scores of the tokens `targets` [places] by the logits [places, vocab] before them.

    most: how many of the likeliest tokens of each place to note, at most MOST_TOP_LOGPROBS.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, targets[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    # Of equally likely ones, which are found first depends on how many are asked for: always as many.
    values, tokens = (each[:, :most] for each in logprobs.topk(min(MOST_TOP_LOGPROBS, logprobs.shape[1])))
    top = [
        dict(zip(place_tokens, place_values, strict=True))
        for place_tokens, place_values in zip(tokens.tolist(), values.tolist(), strict=True)
    ]
    return PromptScores(own.squeeze(1).tolist(), ranks.tolist(), top)
