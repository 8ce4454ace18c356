"""The in-process engine: the training weights themselves, a key/value cache, and batches that never drain.

    generate() -> waiting -> admit: one prefill per prompt, a row per sample -> decode all rows together
                                     ^                                              |
                                     +------------ freed rows ----------------------+

Rows 0..active-1 of the cache are being decoded. A finished row is refilled from the waiting requests; where
none waits, the last row moves into its place, so a decode step never computes on a dead row.
All per-token state lives in tensors; Python sees a sequence twice, when it is admitted and when it ends.

A sample that goes on from known tokens is admitted with prompt and tokens as one prefill, and draws its next token by
the random number that belongs to it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.api import Beginning, Completion, GenerationRequest, UnderWay
from megatron_rl.inference.cache import DecodeLayout, KeyValueCache, PrefillLayout
from megatron_rl.inference.config import InferenceConfig
from megatron_rl.inference.jobs import Branch, Job, Row
from megatron_rl.inference.randomness import uniforms
from megatron_rl.inference.sampling import SamplingRows, sample
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.policy import Policy
from megatron_rl.platform.attention import whole_sequences


class PromptTooLong(ConfigurationError):
    """The prompt and `max_new_tokens` exceed the longest sequence."""


class Engine:
    """Implements `InferenceInterface` over a policy of this process."""

    def __init__(
        self, policy: Policy, model: ModelConfig, config: InferenceConfig, end_token: int, max_length: int | None = None
    ) -> None:
        """max_length: of a prompt and its answer together; by default all positions of the model."""
        self.policy = policy
        self.policy_version = 0
        self.busy_s = 0.0
        """Seconds spent generating so far; the rest of a caller's wait is for something else, such as rewards."""
        self.end_token = end_token
        self.config = config
        self.device = next(policy.parameters()).device
        attention = policy.decoder.layers[0].self_attention
        rows, self.max_length = config.max_batch, max_length or model.max_position_embeddings
        self._limit_name = "training.sequence_length" if max_length else "model.max_position_embeddings"
        self._cache = KeyValueCache(
            layers=model.num_layers,
            rows=rows,
            length=self.max_length,
            kv_heads=attention.num_query_groups_per_partition,
            head_size=attention.hidden_size_per_attention_head,
            dtype=next(policy.parameters()).dtype,
            device=self.device,
        )
        self._waiting: deque[Branch] = deque()
        self._rows: list[Row] = []
        self._loop: asyncio.Task[None] | None = None

        integers = {"dtype": torch.long, "device": self.device}
        self._token = torch.zeros(rows, **integers)  # newest token of each row, not yet in the cache
        self._position = torch.zeros(rows, **integers)  # its position
        self._count = torch.zeros(rows, **integers)  # answer tokens so far
        self._limit = torch.zeros(rows, **integers)
        self._sampling = SamplingRows.empty(rows, self.device)
        self._uniforms = torch.zeros(rows, self.max_length, dtype=torch.float64, device=self.device)
        self._tokens = torch.zeros(rows, self.max_length, **integers)
        self._logprobs = torch.zeros(rows, self.max_length, device=self.device)
        self._first_place = torch.arange(rows, device=self.device) * self.max_length

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """See `InferenceInterface.generate`. Raises PromptTooLong."""
        needed = len(request.prompt_tokens) + request.sampling.max_new_tokens
        if needed > self.max_length:
            raise PromptTooLong(
                f"a prompt of {len(request.prompt_tokens)} tokens and sampling.max_new_tokens "
                f"{request.sampling.max_new_tokens} exceed {self._limit_name} {self.max_length}"
            )
        job = Job(request, self.end_token, asyncio.get_running_loop().create_future())
        self._waiting.extend(job.branches())
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        return await job.done

    def under_way(self) -> list[UnderWay]:
        """See `ResumableInference.under_way`."""
        rows = len(self._rows)
        counts = self._count[:rows].tolist()
        longest = max(counts, default=0)
        tokens = self._tokens[:rows, :longest].tolist()
        logprobs = self._logprobs[:rows, :longest].tolist()
        decoded = [
            UnderWay(row.job.request, row.sample, Beginning(some[:count], theirs[:count], row.policy_version))
            for row, count, some, theirs in zip(self._rows, counts, tokens, logprobs, strict=True)
        ]
        finished = [
            UnderWay(job.request, sample, Beginning(one.tokens, one.logprobs, one.policy_version))
            for job in self._jobs()
            for sample, one in job.completions.items()
        ]
        return decoded + finished

    def _jobs(self) -> list[Job]:
        """Those not answered yet."""
        jobs = [branch.job for branch in self._waiting] + [row.job for row in self._rows]
        return list({id(job): job for job in jobs}.values())

    async def _run(self) -> None:
        """Decode until nothing waits; agents run between two steps."""
        try:
            while self._waiting or self._rows:
                await asyncio.sleep(0)
                self.step()
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        jobs = self._jobs()
        self._waiting.clear()
        self._rows.clear()
        for job in jobs:
            if not job.done.done():
                job.done.set_exception(error)

    @torch.inference_mode()
    def step(self) -> None:
        """One token for every row, then admit what fits."""
        started = time.perf_counter()
        if self._rows:
            self._decode()
        if self._waiting and len(self._rows) < self.config.max_batch:
            self._admit()
        self.busy_s += time.perf_counter() - started

    # Admission

    def _admit(self) -> None:
        """Fill free rows: prefill waiting prompts once each and sample the next token of every new row."""
        admitted = self._choose()
        rows = slice(len(self._rows), len(self._rows) + sum(len(branch.samples) for branch in admitted))
        self._rows.extend(row for branch in admitted for row in branch.rows(self.policy_version))
        prompts = [branch.tokens for branch in admitted]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ends = lengths.cumsum(0)
        prompt = torch.repeat_interleave(torch.tensor([len(branch.samples) for branch in admitted]))  # [rows]
        length = lengths[prompt]

        # Every token of a prompt goes to each of its rows: [copied] places in the packed prompts and in the cache.
        within = torch.arange(int(length.sum())) - torch.repeat_interleave(length.cumsum(0) - length, length)
        source = torch.repeat_interleave((ends - lengths)[prompt], length) + within
        target = torch.repeat_interleave(torch.arange(rows.start, rows.stop) * self.max_length, length) + within
        tokens = [token for tokens in prompts for token in tokens]
        layout = PrefillLayout(
            packed=self.policy.layout(whole_sequences(map(len, prompts))),
            cache=self._cache,
            source=source.to(self.device),
            target=target.to(self.device),
        )
        logits = self.policy(
            torch.tensor(tokens, device=self.device),
            torch.tensor([position for tokens in prompts for position in range(len(tokens))], device=self.device),
            layout,
            (ends - 1).to(self.device),
        )
        self._position[rows] = (length - 1).to(self.device)
        self._count[rows] = 0
        self._set_known(rows, admitted)
        self._set_sampling(rows, admitted)
        self._take(rows, logits.index_select(0, prompt.to(self.device)))

    def _choose(self) -> list[Branch]:
        """Waiting samples for the free rows."""
        admitted: list[Branch] = []
        free, tokens = self.config.max_batch - len(self._rows), 0
        while self._waiting and free and tokens < self.config.prefill_tokens:
            branch = self._waiting[0]
            chosen = replace(branch, samples=branch.samples[:free])
            admitted.append(chosen)
            free -= len(chosen.samples)
            tokens += len(chosen.tokens)
            branch.samples = branch.samples[len(chosen.samples) :]
            if not branch.samples:
                self._waiting.popleft()
        return admitted

    def _set_known(self, rows: slice, admitted: list[Branch]) -> None:
        """Tokens and log-probs that resumed rows begin with, and where they go on."""
        row = rows.start
        for branch in admitted:
            if branch.known:
                count = len(branch.known.tokens)
                self._count[row] = count
                self._tokens[row, :count] = torch.tensor(branch.known.tokens, device=self.device)
                self._logprobs[row, :count] = torch.tensor(branch.known.logprobs, device=self.device)
            row += len(branch.samples)

    def _set_sampling(self, rows: slice, admitted: list[Branch]) -> None:
        """Parameters, limits and random numbers of new rows; neighbours with the same parameters together."""
        first = rows.start
        for sampling, branches in groupby(admitted, key=lambda branch: branch.job.request.sampling):
            limit = sampling.max_new_tokens
            of_rows = ((branch.job.request.key, i) for branch in branches for i in branch.samples)
            keys, sample_indices = zip(*of_rows, strict=True)
            numbers = uniforms(np.array(keys, dtype=np.uint64), sample_indices, limit)
            same = slice(first, first + len(numbers))
            self._limit[same] = limit
            self._sampling.set(same, sampling)
            self._uniforms[same, :limit] = torch.from_numpy(numbers).to(self.device)
            first = same.stop

    # Decoding

    def _decode(self) -> None:
        active = slice(0, len(self._rows))
        positions = self._position[active]
        shortest, longest = (int(x) + 1 for x in positions.aminmax())
        visible = None
        if shortest < longest:
            visible = (torch.arange(longest, device=self.device) <= positions[:, None])[:, None, None]
        layout = DecodeLayout(self._cache, self._first_place[active] + positions, longest, visible)
        self._take(active, self.policy(self._token[active], positions, layout))

    def _take(self, rows: slice, logits: Tensor) -> None:
        """Sample the next token of `rows` from its logits [rows, vocab] and retire the rows that end with it."""
        count = self._count[rows]
        uniform = self._uniforms[rows].gather(1, count[:, None]).squeeze(1)
        token, log_prob = sample(logits, self._sampling[rows], uniform)
        self._tokens[rows].scatter_(1, count[:, None], token[:, None])
        self._logprobs[rows].scatter_(1, count[:, None], log_prob[:, None])
        self._token[rows] = token
        self._position[rows] += 1
        self._count[rows] += 1
        ended = (token == self.end_token) | (self._count[rows] == self._limit[rows])
        if bool(ended.any()):
            self._retire((ended.nonzero().squeeze(1) + rows.start).tolist())

    def _retire(self, ended: list[int]) -> None:
        """Hand over finished sequences and close the gaps they leave."""
        index = torch.tensor(ended, device=self.device)
        counts = self._count[index].tolist()
        longest = max(counts)
        tokens = self._tokens[index, :longest].tolist()
        logprobs = self._logprobs[index, :longest].tolist()
        for place, count, row_tokens, row_logprobs in zip(ended, counts, tokens, logprobs, strict=True):
            row = self._rows[place]
            row.job.finish(row.sample, Beginning(row_tokens[:count], row_logprobs[:count], row.policy_version))
        self._close_gaps(ended)

    def _close_gaps(self, ended: list[int]) -> None:
        """Move the last live rows into the gaps, so that live rows stay 0..active-1."""
        gone = set(ended)
        left = len(self._rows) - len(gone)
        movers = [row for row in range(left, len(self._rows)) if row not in gone]
        gaps = [row for row in ended if row < left]
        for source, target in zip(movers, gaps, strict=True):
            self._rows[target] = self._rows[source]
        del self._rows[left:]
        if not movers:
            return
        source_rows, target_rows = (torch.tensor(x, device=self.device) for x in (movers, gaps))
        self._cache.move(source_rows, target_rows, length=int(self._position[source_rows].max()))
        self._sampling.move(source_rows, target_rows)
        for column in (
            self._token, self._position, self._count, self._limit, self._uniforms, self._tokens, self._logprobs
        ):  # fmt: skip
            column[target_rows] = column[source_rows]
