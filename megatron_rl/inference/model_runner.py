"""Executes the scheduler's plans on one rank: the training weights themselves, a key/value cache, sampling.

All per-token state lives in tensors; Python sees a row twice, when it is filled and when it ends. A row that begins
with an answer's known tokens has prompt and tokens prefilled together, and draws its next token by the random number
that belongs to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from megatron_rl.inference.cache import DecodeLayout, KeyValueCache, PrefillLayout
from megatron_rl.inference.config import InferenceConfig
from megatron_rl.inference.sampling import SamplingRows, sample, uniforms
from megatron_rl.inference.scheduler import Prefill, RowAnswer, StepPlan
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.policy import Policy
from megatron_rl.platform.attention import whole_sequences


class ModelRunner:
    """One policy and the rows that it answers."""

    def __init__(
        self, policy: Policy, model: ModelConfig, config: InferenceConfig, end_token: int, max_length: int
    ) -> None:
        """max_length: of a prompt and its answer together."""
        self.policy = policy
        self.device = next(policy.parameters()).device
        self._end_token = end_token
        attention = policy.decoder.layers[0].self_attention
        rows = config.max_batch
        self._cache = KeyValueCache(
            layers=model.num_layers,
            rows=rows,
            length=max_length,
            kv_heads=attention.num_query_groups_per_partition,
            head_size=attention.hidden_size_per_attention_head,
            dtype=next(policy.parameters()).dtype,
            device=self.device,
        )
        integers = {"dtype": torch.long, "device": self.device}
        self._token = torch.zeros(rows, **integers)  # newest token of each row, not yet in the cache
        self._position = torch.zeros(rows, **integers)  # its position
        self._count = torch.zeros(rows, **integers)  # answer tokens so far
        self._limit = torch.zeros(rows, **integers)
        self._sampling = SamplingRows.empty(rows, self.device)
        self._uniforms = torch.zeros(rows, max_length, dtype=torch.float64, device=self.device)
        self._tokens = torch.zeros(rows, max_length, **integers)
        self._logprobs = torch.zeros(rows, max_length, device=self.device)
        self._first_place = torch.arange(rows, device=self.device) * max_length

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[RowAnswer]:
        """Sample the next token of the plan's rows. Returns the rows that end with it."""
        if plan.moves:
            self._move(plan.moves)
        rows = slice(plan.rows.start, plan.rows.stop)
        logits = self._prefill(rows, plan.prefills) if plan.prefills else self._decode(rows)
        ended = self._sample(rows, logits)
        return self.answers((ended.nonzero().squeeze(1) + rows.start).tolist()) if bool(ended.any()) else []

    def answers(self, rows: Sequence[int]) -> list[RowAnswer]:
        """What these rows have sampled so far."""
        if not rows:
            return []
        index = torch.tensor(rows, device=self.device)
        counts = self._count[index].tolist()
        longest = max(counts)
        tokens = self._tokens[index, :longest].tolist()
        logprobs = self._logprobs[index, :longest].tolist()
        return [
            RowAnswer(row, row_tokens[:count], row_logprobs[:count])
            for row, count, row_tokens, row_logprobs in zip(rows, counts, tokens, logprobs, strict=True)
        ]

    def _prefill(self, rows: slice, prefills: Sequence[Prefill]) -> Tensor:
        """Fill new rows. Returns the logits of their next tokens, [rows, vocab]."""
        sequences = [prefill.tokens for prefill in prefills]
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        ends = lengths.cumsum(0)
        sequence = torch.repeat_interleave(torch.tensor([len(prefill.samples) for prefill in prefills]))  # [rows]
        length = lengths[sequence]

        # Every token of a sequence goes to each of its rows: [copied] places in the packed tokens and in the cache.
        within = torch.arange(int(length.sum())) - torch.repeat_interleave(length.cumsum(0) - length, length)
        source = torch.repeat_interleave((ends - lengths)[sequence], length) + within
        target = torch.repeat_interleave(torch.arange(rows.start, rows.stop) * self._cache.length, length) + within
        tokens = [token for tokens in sequences for token in tokens]
        layout = PrefillLayout(
            packed=self.policy.layout(whole_sequences(map(len, sequences))),
            cache=self._cache,
            source=source.to(self.device),
            target=target.to(self.device),
        )
        logits = self.policy(
            torch.tensor(tokens, device=self.device),
            torch.tensor([position for tokens in sequences for position in range(len(tokens))], device=self.device),
            layout,
            (ends - 1).to(self.device),
        )
        self._position[rows] = (length - 1).to(self.device)
        self._set_answers(rows, prefills)
        self._set_sampling(rows, prefills)
        return logits.index_select(0, sequence.to(self.device))

    def _set_answers(self, rows: slice, prefills: Sequence[Prefill]) -> None:
        """Answer tokens and log-probs that rows begin with."""
        self._count[rows] = 0
        first = rows.start
        for prefill in prefills:
            same = slice(first, first + len(prefill.samples))
            if count := len(prefill.answer_tokens):
                self._count[same] = count
                self._tokens[same, :count] = torch.tensor(prefill.answer_tokens, device=self.device)
                self._logprobs[same, :count] = torch.tensor(prefill.answer_logprobs, device=self.device)
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
            self._uniforms[same, :limit] = torch.from_numpy(numbers).to(self.device)
            first = same.stop

    def _decode(self, rows: slice) -> Tensor:
        """[rows, vocab] logits of the next tokens of the first rows."""
        positions = self._position[rows]
        shortest, longest = (int(x) + 1 for x in positions.aminmax())
        visible = None
        if shortest < longest:
            visible = (torch.arange(longest, device=self.device) <= positions[:, None])[:, None, None]
        layout = DecodeLayout(self._cache, self._first_place[rows] + positions, longest, visible)
        logits: Tensor = self.policy(self._token[rows], positions, layout)
        return logits

    def _sample(self, rows: slice, logits: Tensor) -> Tensor:
        """Draw the next tokens from logits [rows, vocab]. Returns which rows end with it, [rows] bool."""
        count = self._count[rows]
        uniform = self._uniforms[rows].gather(1, count[:, None]).squeeze(1)
        token, log_prob = sample(logits, self._sampling[rows], uniform)
        self._tokens[rows].scatter_(1, count[:, None], token[:, None])
        self._logprobs[rows].scatter_(1, count[:, None], log_prob[:, None])
        self._token[rows] = token
        self._position[rows] += 1
        self._count[rows] += 1
        return (token == self._end_token) | (self._count[rows] == self._limit[rows])

    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        source, target = torch.tensor(moves, device=self.device).unbind(1)
        self._cache.move(source, target, length=int(self._position[source].max()))
        self._sampling.move(source, target)
        for column in (
            self._token, self._position, self._count, self._limit, self._uniforms, self._tokens, self._logprobs
        ):  # fmt: skip
            column[target] = column[source]
