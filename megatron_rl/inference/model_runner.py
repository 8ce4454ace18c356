"""Executes the scheduler's plans on one rank: the training weights themselves, a key/value cache, sampling.

Where the ranks of a replica share the model out, each executes the same plans on its part of every layer, and all have
the logits of the whole vocabulary to sample from.

All per-token state lives in tensors; Python sees a row twice, when it is filled and when it has ended. To see it the
host waits for the device, so it looks only every `Platform.tokens_between_looks` tokens; meanwhile a row that has ended
is computed with the others, and keeps nothing of it. What the host must know of every token (how long sequences are at
most, which sampling parameters occur) it counts by itself.

A row that begins with an answer's known tokens has prompt and tokens prefilled together, and draws its next token by
the random number that belongs to it. Which pages a row has is told by the plans.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.inference.cache import DecodeLayout, KeyValueCache, PrefillLayout
from megatron_rl.inference.config import InferenceConfig
from megatron_rl.inference.places import page_table, places_seen, places_written
from megatron_rl.inference.plans import Prefill, StepPlan
from megatron_rl.inference.sampling import SamplingRows, sample, uniforms
from megatron_rl.inference.top_logprobs import TopLogprobsRows
from megatron_rl.inference.transcript import RowAnswer
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.policy import Policy
from megatron_rl.platform.attention import Layout, whole_sequences
from megatron_rl.platform.paged_attention import PagedRows


class ModelRunner:
    """One policy and the rows that it answers."""

    def __init__(
        self,
        policy: Policy,
        model: ModelConfig,
        config: InferenceConfig,
        pages: tuple[int, int],
        end_ids: Collection[int],
        max_length: int,
    ) -> None:
        """
        pages: of the cache, and places in each.
        end_ids: at least one token that ends an answer.
        max_length: of a prompt and its answer together.
        """
        self.policy = policy
        self.device = next(policy.parameters()).device
        self._tensor = policy.pg_collection.tp
        attention = policy.decoder.layers[0].self_attention
        rows = config.max_batch
        self._length = max_length
        self._page_tokens = pages[1]
        self._make_cache = partial(
            KeyValueCache,
            layers=model.num_layers,
            pages=pages[0],
            page_tokens=self._page_tokens,
            kv_heads=attention.num_query_groups_per_partition,
            head_size=attention.hidden_size_per_attention_head,
            dtype=next(policy.parameters()).dtype,
            device=self.device,
        )
        self.cache: KeyValueCache | None = None
        """Made when it is first needed."""
        integers = {"dtype": torch.long, "device": self.device}
        self._token = torch.zeros(rows, **integers)  # newest token of each row, not yet in the cache
        self._position = torch.zeros(rows, **integers)  # its position
        self._count = torch.zeros(rows, **integers)  # answer tokens so far
        self._limit = torch.zeros(rows, **integers)
        self._ended = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self._sampling = SamplingRows.empty(rows, self.device, end_ids)
        self._top = TopLogprobsRows(rows, policy.tokens_between_looks, policy.vocabulary, self.device)
        self._uniforms = torch.zeros(rows, max_length, dtype=torch.float64, device=self.device)
        self._tokens = torch.zeros(rows, max_length, **integers)
        self._logprobs = torch.zeros(rows, max_length, device=self.device)
        self._pages = torch.zeros(rows, -(-max_length // pages[1]), dtype=torch.int32, device=self.device)
        # The host's own counts, exact for rows that have not ended, else the most it can be.
        self._most_positions = np.zeros(rows, dtype=np.int64)
        self._most_tokens = np.zeros(rows, dtype=np.int64)
        self._tokens_until_look = policy.tokens_between_looks

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[int] | None:
        """Sample the next token of the plan's rows. Returns the rows that have ended; None where the host did not
        look."""
        cache = self.cache = self.cache or self._make_cache()
        if plan.moves:
            self._move(plan.moves)
        if plan.pages:
            row, place, page = _tensor(plan.pages, self.device).unbind(1)
            self._pages[row, place] = page.int()
        rows = slice(plan.rows.start, plan.rows.stop)
        logits = self._prefill(rows, plan.prefills, cache) if plan.prefills else self._decode(rows, cache)
        if not plan.rows:
            return None
        self._sample(rows, logits)
        self._tokens_until_look -= 1
        if self._tokens_until_look:
            return None
        self._tokens_until_look = self.policy.tokens_between_looks
        ended: list[int] = np.flatnonzero(_read(self._ended[: rows.stop])).tolist()
        return ended

    def answers(self, known: Mapping[int, int]) -> list[RowAnswer]:
        """What rows have sampled so far; known: row -> how many of its first tokens to leave out."""
        if not known:
            return []
        rows, first = [*known], [*known.values()]
        most = min(int((self._most_tokens[rows] - first).max()), self._length)
        index = _tensor(rows, self.device)
        places = _tensor(first, self.device)[:, None] + torch.arange(most, device=self.device)
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

    def _prefill(self, rows: slice, prefills: Sequence[Prefill], cache: KeyValueCache) -> Tensor:
        """Compute tokens, and fill the rows that begin with them. Returns the logits of their next tokens, [rows,
        vocab]."""
        ends = np.cumsum([len(prefill.tokens) for prefill in prefills])
        last = [(end - 1, prefill) for end, prefill in zip(ends.tolist(), prefills, strict=True) if prefill.samples]
        positions = [np.arange(each.start, each.start + len(each.tokens)) for each in prefills]
        logits = self.policy(
            _tensor([token for prefill in prefills for token in prefill.tokens], self.device),
            _tensor(np.concatenate(positions), self.device),
            self._prefill_layout(prefills, cache),
            _tensor(np.array([end for end, _ in last], dtype=np.int64), self.device),
        )
        if not last:
            return logits
        begun = [prefill for _, prefill in last]
        samples = [len(prefill.samples) for prefill in begun]
        newest = np.repeat([prefill.start + len(prefill.tokens) - 1 for prefill in begun], samples)
        self._position[rows] = _tensor(newest, self.device)
        self._most_positions[rows] = newest
        self._ended[rows] = False
        table = page_table(begun)
        self._pages[rows, : table.shape[1]] = _tensor(table, self.device)
        self._set_answers(rows, begun)
        self._set_sampling(rows, begun)
        sequence = _tensor(np.repeat(np.arange(len(begun)), samples), self.device)  # of each row
        return self.policy.whole_logits(logits).index_select(0, sequence)

    def _prefill_layout(self, prefills: Sequence[Prefill], cache: KeyValueCache) -> Layout:
        """Attention among the tokens themselves, where all of them are there, else to what the cache has of the same
        sequences."""
        source, target = (_tensor(each, self.device) for each in places_written(prefills, self._page_tokens))
        stops = [prefill.start + len(prefill.tokens) for prefill in prefills]
        whole = whole_sequences(stops)
        if not any(prefill.start for prefill in prefills):
            return PrefillLayout(self.policy.layout(whole), cache, source, target, None)
        offsets = np.cumsum([0, *stops[:-1]])
        part = [
            np.arange(offset + prefill.start, offset + stop)
            for offset, stop, prefill in zip(offsets, stops, prefills, strict=True)
        ]
        layout = self.policy.layout(whole, torch.from_numpy(np.concatenate(part)))
        seen = _tensor(places_seen(prefills, self._page_tokens), self.device)
        return PrefillLayout(layout, cache, source, target, seen)

    def _set_answers(self, rows: slice, prefills: Sequence[Prefill]) -> None:
        """Answer tokens and log-probs that rows begin with."""
        self._count[rows] = 0
        self._most_tokens[rows] = 0
        first = rows.start
        for prefill in prefills:
            same = slice(first, first + len(prefill.samples))
            if count := len(prefill.answer_tokens):
                self._count[same] = self._most_tokens[same] = count
                self._tokens[same, :count] = _tensor(prefill.answer_tokens, self.device)
                self._logprobs[same, :count] = _tensor(prefill.answer_logprobs, self.device)
            self._top.set(same, prefill.top_logprobs)
            first = same.stop

    def _set_sampling(self, rows: slice, prefills: Sequence[Prefill]) -> None:
        """Parameters, limits and random numbers of new rows; consecutive ones with the same parameters together."""
        first = rows.start
        for sampling, alike in groupby(prefills, key=lambda prefill: prefill.sampling):
            limit = sampling.max_new_tokens
            keys, samples = zip(*((prefill.key, i) for prefill in alike for i in prefill.samples), strict=True)
            numbers = uniforms(np.array(keys, dtype=np.uint64), samples, limit)
            same = slice(first, first + len(numbers))
            self._limit[same] = limit
            self._sampling.set(same, sampling)
            self._uniforms[same, :limit] = torch.from_numpy(numbers).to(self.device, non_blocking=True)
            first = same.stop

    def _decode(self, rows: slice, cache: KeyValueCache) -> Tensor:
        """[rows, vocab] logits of the next tokens of the first rows."""
        positions, table = self._position[rows], self._pages[rows]
        page = table.gather(1, (positions // self._page_tokens)[:, None]).squeeze(1)
        bounds = (self._most_positions[rows] + 1).clip(max=self._length)
        paged = PagedRows(table, positions + 1, bounds, self._page_tokens)
        target = page * self._page_tokens + positions % self._page_tokens
        layout = DecodeLayout(cache, target, self.policy.paged_attention(paged))
        return self.policy.whole_logits(self.policy(self._token[rows], positions, layout))

    def _sample(self, rows: slice, logits: Tensor) -> None:
        """Draw the next tokens from logits [rows, vocab]. A row that has ended does not move on: it draws again what
        would have followed its last token, and nobody reads that."""
        count, goes_on = self._count[rows], ~self._ended[rows]
        uniform = self._uniforms[rows].gather(1, count[:, None]).squeeze(1)
        sampling = self._sampling[rows]
        held = count < sampling.least if (sampling.holds > self._most_tokens[rows]).any() else None
        token, log_prob = sample(logits, sampling, uniform, held)
        if self._tensor.size() > 1:
            # All draw by the same number from the same logits. But a GPU may add up in another order every time, and
            # ranks that go on from different tokens would make up an answer that none of them has sampled.
            dist.broadcast(token, group=self._tensor, group_src=0)
        self._tokens[rows].scatter_(1, count[:, None], token[:, None])
        self._logprobs[rows].scatter_(1, count[:, None], log_prob[:, None])
        self._top.record(rows, count, logits, sampling.temperature)
        self._token[rows] = token
        self._position[rows] += goes_on
        count += goes_on
        self._ended[rows] |= sampling.ended_by(token) | (count == self._limit[rows])
        self._most_positions[rows] += 1
        self._most_tokens[rows] += 1

    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        sources, targets = (list(rows) for rows in zip(*moves, strict=True))
        source, target = _tensor(moves, self.device).unbind(1)
        self._sampling.move(sources, targets)
        self._top.move(sources, targets, source, target)
        for column in (
            self._token, self._position, self._count, self._limit, self._ended, self._uniforms, self._tokens,
            self._logprobs, self._pages,
        ):  # fmt: skip
            column[target] = column[source]
        for counts in (self._most_positions, self._most_tokens):
            counts[targets] = counts[sources]


def _read(tensor: Tensor) -> NDArray[Any]:
    """The only place where the host waits for the device."""
    return tensor.numpy(force=True)


def _tensor(values: Sequence[object] | NDArray[Any], device: torch.device) -> Tensor:
    """Values on the device, without waiting for what it computes."""
    return torch.as_tensor(values).to(device, non_blocking=True)
