"""Log-probs of the likeliest tokens at each position of answers and prompts, for requests that ask for them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.generate.engine.interface import MOST_TOP_LOGPROBS, PromptScores, TopLogprobs


class TopLogprobsRows:
    def __init__(self, rows: int, between_syncs: int, vocab: int, device: torch.device) -> None:
        self._asked = np.zeros(rows, dtype=np.int64)
        self._kept = between_syncs
        self._most = min(MOST_TOP_LOGPROBS, vocab)
        shape = rows, between_syncs, self._most
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(shape, device=device)

    def set(self, rows: slice, asked: int) -> None:
        self._asked[rows] = min(asked, self._most)

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64], source: Tensor, target: Tensor) -> None:
        if self._asked[sources].any():
            self._tokens[target] = self._tokens[source]
            self._logprobs[target] = self._logprobs[source]
        self._asked[targets] = self._asked[sources]

    def most(self, rows: slice) -> int:
        return int(self._asked[rows].max())

    def record(self, rows: slice, count: Tensor, logits: Tensor, temperature: Tensor, most: int) -> None:
        """Note the `most` likeliest tokens at the next position of these rows.

        count [rows] answer tokens before it; logits [rows, vocab]; temperature [rows]; 0 counts as 1.
        """
        if not most:
            return
        temperature = temperature.masked_fill(temperature == 0, 1.0)
        logprobs = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
        # Always the same topk: which of equally likely tokens it puts first depends on how many are asked for.
        values, tokens = (each[:, :most] for each in logprobs.topk(self._most))
        slot = (count % self._kept)[:, None, None].expand(-1, 1, values.shape[1])
        self._tokens[rows].scatter_(1, slot, tokens[:, None].int())
        self._logprobs[rows].scatter_(1, slot, values[:, None])

    def columns(self, rows: NDArray[np.int64], index: Tensor, positions: Tensor) -> list[Tensor]:
        """Return tokens and log-probs at these positions, each [rows, positions * likeliest] of 32 bits; an empty list
        if no row asks for any.

        index [rows] the rows, on the device; positions [rows, positions] in their answers.
        """
        most = int(self._asked[rows].max())
        if not most:
            return []
        at = index[:, None], positions % self._kept
        return [each[at][..., :most].flatten(1).view(torch.int32) for each in (self._tokens, self._logprobs)]

    def parse(self, rows: NDArray[np.int64], read: NDArray[np.int32], positions: int) -> list[list[TopLogprobs] | None]:
        """Parse `columns` [rows, 2 * positions * likeliest] of each row; None for rows that ask for none."""
        asked = self._asked[rows].tolist()
        if not max(asked):
            return [None] * len(asked)
        tokens, logprobs = read.reshape(len(asked), 2, positions, max(asked)).swapaxes(0, 1)
        return [
            [_possible(row_tokens[at, :count].tolist(), row_logprobs[at, :count].tolist()) for at in range(positions)]
            if count
            else None
            for count, row_tokens, row_logprobs in zip(asked, tokens, logprobs.view(np.float32), strict=True)
        ]


def _possible(tokens: Sequence[int], logprobs: Sequence[float]) -> TopLogprobs:
    """Leave out tokens that could not be drawn, of which there may be fewer than are asked for."""
    return {token: each for token, each in zip(tokens, logprobs, strict=True) if each > -math.inf}


def prompt_scores(logits: Tensor, targets: Tensor, most: int) -> PromptScores:
    """Return scores of the tokens `targets` [positions] by the logits [positions, vocab] before them.

    most: how many of the likeliest tokens of each position to note, at most MOST_TOP_LOGPROBS.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, targets[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    # Always the same topk, as in TopLogprobsRows.record.
    values, tokens = (each[:, :most].tolist() for each in logprobs.topk(min(MOST_TOP_LOGPROBS, logprobs.shape[1])))
    top = [dict(zip(*position, strict=True)) for position in zip(tokens, values, strict=True)]
    return PromptScores(own.squeeze(1).tolist(), ranks.tolist(), top)
