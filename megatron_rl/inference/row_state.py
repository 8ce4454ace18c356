"""All per-token state of the rows, in tensors that stay where they are for as long as the engine lives.

Python sees a row twice, when it is filled and when it has ended. To see it the host waits for the device, so it looks
only every `Platform.tokens_between_syncs` tokens; meanwhile a row that has ended is computed with the others, and keeps
nothing of it. What the host must know of every token (how long sequences are at most, which sampling parameters occur)
it counts by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.inference.adjustments import AdjustedRows
from megatron_rl.inference.config import Sampling
from megatron_rl.inference.plans import Prefill
from megatron_rl.inference.sampling import SamplingRows, SamplingWork, sample, uniforms
from megatron_rl.inference.top_logprobs import TopLogprobsRows
from megatron_rl.inference.transcript import RowAnswer
from megatron_rl.model.policy import Policy


@dataclass(frozen=True, slots=True)
class DrawWork:
    """What has to be computed to draw the next tokens of some rows, as the host knows it."""

    sampling: SamplingWork
    top_logprobs: int
    """So many of the likeliest tokens of each are noted."""
    adjusted: bool
    """Whether any is sampled from adjusted logits."""


class RowState:
    """The rows that a policy answers."""

    def __init__(
        self,
        policy: Policy,
        rows: int,
        max_length: int,
        page_tokens: int,
        end_ids: Collection[int],
        spare_page: int | None = None,
    ) -> None:
        """
        max_length: of a prompt and its answer together. page_tokens: places of a page.
        end_ids: at least one token that ends an answer.
        spare_page: of the cache, where rows that nobody has may write; None: they are not computed.
        """
        self._device = policy.device
        self._spare_page = spare_page
        self._occupied = 0
        self._tensor_parallel = policy.pg_collection.tp
        self._length = max_length
        integers: dict[str, Any] = {"dtype": torch.long, "device": self._device}
        self.token = torch.zeros(rows, **integers)
        """[rows] newest token, not yet in the cache."""
        self.position = torch.zeros(rows, **integers)
        """[rows] its position."""
        width = -(-max_length // page_tokens)
        self.pages = torch.full((rows, width), spare_page or 0, dtype=torch.int32, device=self._device)
        """[rows, pages] of each, from its first token on."""
        self._count = torch.zeros(rows, **integers)  # answer tokens so far
        self._limit = torch.zeros(rows, **integers)
        self._ended = torch.ones(rows, dtype=torch.bool, device=self._device)
        self._sampling = SamplingRows.empty(rows, self._device, end_ids)
        # Rows of one number have the same parameters, as most have: then there is nothing to copy.
        self._numbers = np.zeros(rows, dtype=np.int64)
        self._newest: tuple[int, Sampling | None] = (0, None)
        self._top = TopLogprobsRows(rows, policy.tokens_between_syncs, policy.vocabulary, self._device)
        self._adjusted = AdjustedRows(rows, max_length, policy.vocabulary, self._device)
        self._uniforms = torch.zeros(rows, max_length, dtype=torch.float64, device=self._device)
        self._tokens = torch.zeros(rows, max_length, **integers)
        self._logprobs = torch.zeros(rows, max_length, device=self._device)
        # The host's own counts, exact for rows that have not ended, else the most it can be.
        self._most_positions = np.zeros(rows, dtype=np.int64)
        self._most_tokens = np.zeros(rows, dtype=np.int64)

    def lengths(self, rows: slice) -> NDArray[np.int64]:
        """[rows] tokens of each with its newest, at most."""
        return (self._most_positions[rows] + 1).clip(max=self._length)

    # Between two tokens

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """(from, to): copy rows into the places of others."""
        sources, targets = (list(rows) for rows in zip(*moves, strict=True))
        source, target = to_device(moves, self._device).unbind(1)
        if (self._numbers[sources] != self._numbers[targets]).any():
            self._sampling.move(sources, targets)
            self._limit[target] = self._limit[source]
            self._numbers[targets] = self._numbers[sources]
        self._top.move(sources, targets, source, target)
        self._adjusted.move(sources, targets, source, target)
        for column in (
            self.token, self.position, self.pages, self._count, self._ended, self._uniforms, self._tokens,
            self._logprobs,
        ):  # fmt: skip
            column[target] = column[source]
        for counts in (self._most_positions, self._most_tokens):
            counts[targets] = counts[sources]

    def occupy(self, rows: int) -> None:
        """Only the first rows are somebody's. Those behind them, whose pages others may have by now, are at the first
        place of the spare page from here on, and stay there: they have ended."""
        if self._spare_page is not None and rows < self._occupied:
            left = slice(rows, self._occupied)
            self.pages[left, 0] = self._spare_page
            self.position[left] = 0
            self._ended[left] = True
        self._occupied = rows

    def give_pages(self, given: Sequence[tuple[int, int, int]]) -> None:
        """(row, place, page): the page at that place of a row's pages."""
        row, place, page = to_device(given, self._device).unbind(1)
        self.pages[row, place] = page.int()

    def begin(self, rows: slice, prefills: Sequence[Prefill]) -> None:
        """Fill rows with the samples of these prefills, one behind the other."""
        samples = [len(prefill.samples) for prefill in prefills]
        newest = np.repeat([prefill.start + len(prefill.tokens) - 1 for prefill in prefills], samples)
        self.position[rows] = to_device(newest, self._device)
        self._most_positions[rows] = newest
        self._ended[rows] = False
        table = _page_table(prefills)
        self.pages[rows, : table.shape[1]] = to_device(table, self._device)
        self._set_answers(rows, prefills)
        self._set_sampling(rows, prefills)

    def _set_answers(self, rows: slice, prefills: Sequence[Prefill]) -> None:
        """Answer tokens and log-probs that rows begin with."""
        self._count[rows] = 0
        self._most_tokens[rows] = 0
        first = rows.start
        for prefill in prefills:
            same = slice(first, first + len(prefill.samples))
            if count := len(prefill.answer_tokens):
                self._count[same] = self._most_tokens[same] = count
                self._tokens[same, :count] = to_device(prefill.answer_tokens, self._device)
                self._logprobs[same, :count] = to_device(prefill.answer_logprobs, self._device)
            self._top.set(same, prefill.top_logprobs)
            self._adjusted.set(same, prefill)
            first = same.stop

    def _set_sampling(self, rows: slice, prefills: Sequence[Prefill]) -> None:
        """Parameters, limits and random numbers of new rows; consecutive ones with the same parameters together."""
        first = rows.start
        for sampling, alike in groupby(prefills, key=lambda prefill: prefill.sampling):
            limit = sampling.max_new_tokens
            keys, samples = zip(*((prefill.key, i) for prefill in alike for i in prefill.samples), strict=True)
            numbers = uniforms(np.array(keys, dtype=np.uint64), samples, limit)
            same = slice(first, first + len(numbers))
            self._set_parameters(same, sampling)
            self._uniforms[same, :limit] = torch.from_numpy(numbers).to(self._device, non_blocking=True)
            first = same.stop

    def _set_parameters(self, rows: slice, sampling: Sampling) -> None:
        number, known = self._newest
        if sampling != known:
            number += 1
            self._newest = number, sampling
        if (self._numbers[rows] != number).any():
            self._sampling.set(rows, sampling)
            self._limit[rows] = sampling.max_new_tokens
            self._numbers[rows] = number

    # A token

    def work(self, rows: slice) -> DrawWork:
        """What the next tokens of rows take."""
        sampling = self._sampling.work(rows, self._most_tokens[rows])
        return DrawWork(sampling, self._top.most(rows), self._adjusted.asks(rows))

    def draw(self, rows: slice, logits: Tensor, work: DrawWork) -> None:
        """Draw the next tokens from logits [rows, vocab]. A row that has ended does not move on: it draws again what
        would have followed its last token, and nobody reads that.

        Of the host it asks nothing but `work`; `count_token` is what the host does about it.
        """
        count, goes_on = self._count[rows], ~self._ended[rows]
        uniform = self._uniforms[rows].gather(1, count[:, None]).squeeze(1)
        sampling = self._sampling[rows]
        adjusted = self._adjusted.adjusted(rows, logits, self._tokens[rows], count) if work.adjusted else None
        token, log_prob, ends = sample(logits, sampling, work.sampling, uniform, count, adjusted)
        if self._tensor_parallel.size() > 1:
            # All draw by the same number from the same logits. But a GPU may add up in another order every time, and
            # ranks that go on from different tokens would make up an answer that none of them has sampled.
            dist.broadcast(token, group=self._tensor_parallel, group_src=0)
        self._tokens[rows].scatter_(1, count[:, None], token[:, None])
        self._logprobs[rows].scatter_(1, count[:, None], log_prob[:, None])
        self._top.record(rows, count, logits, sampling.temperature, work.top_logprobs)
        self.token[rows] = token
        self.position[rows] += goes_on
        count += goes_on
        self._ended[rows] |= ends | (count == self._limit[rows])

    def count_token(self, rows: slice) -> None:
        """The host's counts of rows that have one more."""
        self._most_positions[rows] += 1
        self._most_tokens[rows] += 1

    # What the host looks at

    def ended(self, rows: int) -> list[int]:
        """Which of the first rows have ended."""
        found: list[int] = np.flatnonzero(_read(self._ended[:rows])).tolist()
        return found

    def answers(self, known: Mapping[int, int]) -> list[RowAnswer]:
        """What rows have sampled so far; known: row -> how many of its first tokens to leave out."""
        if not known:
            return []
        rows, first = [*known], [*known.values()]
        most = min(int((self._most_tokens[rows] - first).max()), self._length)
        index = to_device(rows, self._device)
        places = to_device(first, self._device)[:, None] + torch.arange(most, device=self._device)
        places.clamp_(max=self._length - 1)
        at = index[:, None], places
        # One array, because to read one is to wait for the device.
        read = _read(
            torch.cat(
                (
                    self._count[index, None].int(),
                    self._tokens[at].int(),
                    self._logprobs[at].view(torch.int32),
                    *self._top.columns(rows, index, places),
                ),
                dim=1,
            )
        )
        counts = (read[:, 0] - np.array(first)).tolist()
        tokens = read[:, 1 : 1 + most].tolist()
        logprobs = read[:, 1 + most : 1 + 2 * most].copy().view(np.float32).tolist()
        top = self._top.parse(rows, read[:, 1 + 2 * most :], most)
        return [
            RowAnswer(row, tokens[i][:count], logprobs[i][:count], top and top[:count])
            for i, (row, count, top) in enumerate(zip(rows, counts, top, strict=True))
        ]


def _read(tensor: Tensor) -> NDArray[Any]:
    """The only place where the host waits for the device."""
    return tensor.numpy(force=True)


def to_device(values: Sequence[object] | NDArray[Any], device: torch.device) -> Tensor:
    """Values on the device, without waiting for what it computes."""
    return torch.as_tensor(values).to(device, non_blocking=True)


def _page_table(prefills: Sequence[Prefill]) -> NDArray[np.int32]:
    """[rows, pages] int32 of the rows that the prefills begin, filled up with zeros."""
    rows = sum(len(prefill.samples) for prefill in prefills)
    pages = np.zeros((rows, 1 + max(len(prefill.pages) for prefill in prefills)), dtype=np.int32)
    first = 0
    for prefill in prefills:
        same = slice(first, first + len(prefill.samples))
        pages[same, : len(prefill.pages)] = prefill.pages
        pages[same, len(prefill.pages)] = prefill.own
        first = same.stop
    return pages
