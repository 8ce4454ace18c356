"""Per-token state of all rows, in tensors that keep their addresses for as long as the engine lives.

The host handles a row twice: when it is filled and when it has ended. To notice the end it must wait for the device, so
it does so only every `Kernels.tokens_between_syncs` tokens. Until then an ended row is computed with the others, and
what it samples is discarded. The host itself counts what it needs for every token: the longest possible length of each
row, and the sampling parameters in use.
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

from megatron_rl.generate.engine.admission import Prefill
from megatron_rl.generate.engine.choice_cache import ChoiceCache
from megatron_rl.generate.engine.row_grammars import RowGrammars
from megatron_rl.generate.engine.sampling import SamplingRows, SamplingWork, sample, uniforms
from megatron_rl.generate.engine.top_logprobs import TopLogprobsRows
from megatron_rl.generate.engine.transcript import Amount, RowAnswer
from megatron_rl.model.choices import Choices
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.inference import Sampling


@dataclass(frozen=True, slots=True)
class DrawWork:
    """Work that drawing the next tokens of some rows takes, as far as the host knows. Part of a recording's key."""

    sampling: SamplingWork
    top_logprobs: int
    forced: bool = False
    """Whether a row may not draw all tokens."""


class RowState:
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
        max_length: tokens of a prompt and its answer together. page_tokens: slots of a page.
        end_ids: at least one token that ends an answer.
        spare_page: page of the cache to which padding rows write; None: padding rows are not computed.
        """
        self._device = policy.device
        self._spare_page = spare_page
        self._occupied = 0
        self._tensor_parallel = policy.pg_collection.tp
        self._length = max_length
        integers: dict[str, Any] = {"dtype": torch.long, "device": self._device}
        self.token = torch.zeros(rows, **integers)
        """[rows] newest token, whose keys and values are not in the cache yet."""
        self.position = torch.zeros(rows, **integers)
        width = -(-max_length // page_tokens)
        self.pages = torch.full((rows, width), spare_page or 0, dtype=torch.int32, device=self._device)
        """[rows, pages] pages of each row, from its first token."""
        self._count = torch.zeros(rows, **integers)  # answer tokens so far
        self._limit = torch.zeros(rows, **integers)
        self._ended = torch.ones(rows, dtype=torch.bool, device=self._device)
        self._sampling = SamplingRows(rows, self._device, end_ids)
        # Rows with the same number have the same parameters. Most rows do, so moving a row copies nothing.
        self._numbers = np.zeros(rows, dtype=np.int64)
        self._newest: tuple[int, Sampling | None] = (0, None)
        self._top = TopLogprobsRows(rows, policy.kernels.tokens_between_syncs, policy.vocabulary, self._device)
        self.grammars = RowGrammars(rows, policy.vocabulary, self._device)
        self._uniforms = torch.zeros(rows, max_length, dtype=torch.float64, device=self._device)
        self._tokens = torch.zeros(rows, max_length, **integers)
        self._logprobs = torch.zeros(rows, max_length, device=self._device)
        # The host's own counts: exact for rows that have not ended, upper bounds for the others.
        self._most_positions = np.zeros(rows, dtype=np.int64)
        self._most_tokens = np.zeros(rows, dtype=np.int64)

    def lengths(self, rows: slice) -> NDArray[np.int64]:
        """Return the length of each row with its newest token, at most: [rows]."""
        return (self._most_positions[rows] + 1).clip(max=self._length)

    # Between two steps

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy rows: (from, to) each."""
        sources, targets = np.array(moves).T
        source, target = to_device(sources, self._device), to_device(targets, self._device)
        if (self._numbers[sources] != self._numbers[targets]).any():
            self._sampling.move(sources, targets, source, target)
            self._limit[target] = self._limit[source]
            self._numbers[targets] = self._numbers[sources]
        self._top.move(sources, targets, source, target)
        self.grammars.move(sources, targets)
        for column in (
            self.token, self.position, self.pages, self._count, self._ended, self._uniforms, self._tokens,
            self._logprobs,
        ):  # fmt: skip
            column.index_copy_(0, target, column.index_select(0, source))
        for counts in (self._most_positions, self._most_tokens):
            counts[targets] = counts[sources]

    def occupy(self, rows: int) -> None:
        """Note that only the first rows are in use. The others may have lost their pages, so from here on they write to
        the first slot of the spare page, and count as ended."""
        if self._spare_page is not None and rows < self._occupied:
            left = slice(rows, self._occupied)
            self.pages[left, 0] = self._spare_page
            self.position[left] = 0
            self._ended[left] = True
        self._occupied = rows

    def give_pages(self, given: Sequence[tuple[int, int, int]]) -> None:
        """Set pages of rows: (row, index, page) each."""
        row, index, page = to_device(given, self._device).unbind(1)
        self.pages[row, index] = page.int()

    def begin(self, rows: slice, prefills: Sequence[Prefill]) -> None:
        """Fill the rows with the samples of these prefills, one after the other."""
        samples = [len(prefill.samples) for prefill in prefills]
        newest = np.repeat([prefill.start + len(prefill.tokens) - 1 for prefill in prefills], samples)
        self.position[rows] = to_device(newest, self._device)
        self._most_positions[rows] = newest
        self._ended[rows] = False
        table = _page_table(prefills)
        self.pages[rows, : table.shape[1]] = to_device(table, self._device)
        self._set_answers(rows, prefills)
        self._set_sampling(rows, prefills)
        self.grammars.begin(rows, prefills)

    def _set_answers(self, rows: slice, prefills: Sequence[Prefill]) -> None:
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
            first = same.stop

    def _set_sampling(self, rows: slice, prefills: Sequence[Prefill]) -> None:
        first = rows.start
        for sampling, alike in groupby(prefills, key=lambda prefill: prefill.sampling):
            limit, its = sampling.max_new_tokens, [*alike]
            keys = np.array([prefill.key for prefill in its], dtype=np.uint64)
            samples = [sample for prefill in its for sample in prefill.samples]
            numbers = uniforms(np.repeat(keys, [len(prefill.samples) for prefill in its]), samples, limit)
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

    # One step

    def work(self, rows: slice) -> DrawWork:
        sampling = self._sampling.work(rows, self._most_tokens[rows])
        return DrawWork(sampling, self._top.most(rows), self.grammars.any(rows))

    def follow_grammars(self, rows: slice) -> None:
        """Before a decoding step, note which tokens the rows may draw in it."""
        self.grammars.take(rows, self.token[rows], self._ended[rows])

    def draw(self, rows: slice, logits: Tensor, work: DrawWork) -> None:
        """Draw the next tokens from logits [rows, vocab]. A row that has ended does not advance: it draws the token
        after its last one again, and nobody reads it.

        Apart from `work` this uses no knowledge of the host, which `count_token` updates.
        """
        # A recorded step repeats exactly these operations, at these addresses. So no row is left out and no shape
        # depends on a value: an ended row is computed like the others, and `advances` adds 0 to its position and count.
        # It draws the token after its last one again and again, into a place that nobody reads. A Python `if` on a
        # value of the device would be decided once, when the step is recorded.
        count, advances = self._count[rows], ~self._ended[rows]
        uniform = self._uniforms[rows].gather(1, count[:, None]).squeeze(1)
        sampling = self._sampling[rows]
        if work.forced:
            logits = self.grammars.apply(rows, logits)
        token, log_prob, ends = sample(logits, sampling, work.sampling, uniform, count)
        if self._tensor_parallel.size() > 1:
            # All ranks draw by the same number from the same logits. But a GPU may sum in another order each time, and
            # ranks that continued from different tokens would compute an answer that none of them has sampled.
            dist.broadcast(token, group=self._tensor_parallel, group_src=0)
        self._tokens[rows].scatter_(1, count[:, None], token[:, None])
        self._logprobs[rows].scatter_(1, count[:, None], log_prob[:, None])
        self._top.record(rows, count, logits, sampling.temperature, work.top_logprobs)
        self.token[rows] = token
        self.position[rows] += advances
        count += advances
        self._ended[rows] |= ends | (count == self._limit[rows])

    def count_token(self, rows: slice) -> None:
        self._most_positions[rows] += 1
        self._most_tokens[rows] += 1

    # What the host reads from the device

    def ended(self, rows: int) -> list[int]:
        found: list[int] = np.flatnonzero(_read(self._ended[:rows])).tolist()
        return found

    def answers(self, held: Mapping[int, Amount], choices: ChoiceCache | None = None) -> list[RowAnswer]:
        """Return the sampled tokens of rows, and their choices of experts if there is a cache of them.

        held: row -> what to leave out.
        """
        if not held:
            return []
        rows, first = np.array([*held]), np.array([each.tokens for each in held.values()])
        most = min(int((self._most_tokens[rows] - first).max()), self._length)
        index = to_device(rows, self._device)
        columns = to_device(first, self._device)[:, None] + torch.arange(most, device=self._device)
        columns.clamp_(max=self._length - 1)
        at = index[:, None], columns
        # One array, since each read waits for the device.
        read = _read(
            torch.cat(
                (
                    self._count[index, None].int(),
                    self._tokens[at].int(),
                    self._logprobs[at].view(torch.int32),
                    *self._top.columns(rows, index, columns),
                ),
                dim=1,
            )
        )
        counts = (read[:, 0] - first).tolist()
        tokens = read[:, 1 : 1 + most].tolist()
        logprobs = read[:, 1 + most : 1 + 2 * most].copy().view(np.float32).tolist()
        top = self._top.parse(rows, read[:, 1 + 2 * most :], most)
        experts: Sequence[Choices] = [[]] * len(rows)
        if choices is not None:
            stop = _read(self.position[index])  # the newest token is not computed yet
            experts = choices.read(self.pages[index], np.array([each.choices for each in held.values()]), stop)
        return [
            RowAnswer(row, tokens[i][:count], logprobs[i][:count], top and top[:count], experts[i])
            for i, (row, count, top) in enumerate(zip(held, counts, top, strict=True))
        ]


def _read(tensor: Tensor) -> NDArray[Any]:
    """Copy to the host: the only place that waits for the device."""
    return tensor.numpy(force=True)


def to_device(values: Sequence[object] | NDArray[Any], device: torch.device) -> Tensor:
    """Copy values to the device, without waiting for it. numpy reads a list four times as fast as torch."""
    return torch.from_numpy(np.asarray(values)).to(device, non_blocking=True)


def _page_table(prefills: Sequence[Prefill]) -> NDArray[np.int32]:
    """Return the pages of the rows that the prefills start, [rows, pages], padded with zeros."""
    rows = sum(len(prefill.samples) for prefill in prefills)
    pages = np.zeros((rows, 1 + max(len(prefill.pages) for prefill in prefills)), dtype=np.int32)
    first = 0
    for prefill in prefills:
        same = slice(first, first + len(prefill.samples))
        pages[same, : len(prefill.pages)] = prefill.pages
        pages[same, len(prefill.pages)] = prefill.own
        first = same.stop
    return pages
