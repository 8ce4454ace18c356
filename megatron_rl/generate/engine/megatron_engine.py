"""megatron-core's dynamic engine behind this project's interface.

megatron-core schedules, keeps the cache, computes and draws. This file adds what it lacks: resumed answers, several end
tokens, stop strings, policy versions, and ranks in step without sockets. It uses only what is the same in 0.16.1 and
0.19; megatron_parts.py builds the engine, which differs.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.generate.engine.broadcast import PlanBroadcast
from megatron_rl.generate.engine.interface import Completion, GenerationRequest, PartialAnswer, Unsupported
from megatron_rl.generate.engine.loop_driver import LoopDriver
from megatron_rl.generate.engine.megatron_parts import (
    EngineSizes,
    build_dynamic_engine,
    check_requirements,
    close_dynamic_engine,
    sampling_params,
)
from megatron_rl.generate.engine.request_limits import RequestLimits, refuse_duplicate
from megatron_rl.generate.engine.transcript import RowAnswer, Transcript
from megatron_rl.model.megatron_gpt import megatron_gpt
from megatron_rl.model.policy import Policy
from megatron_rl.model.text_stream import Decode
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.profiler import GenerationProfiler
from megatron_rl.recipe.inference import InferenceConfig, Sampling, beyond_megatron, pages_of
from megatron_rl.recipe.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Begun:
    id: int
    tokens: list[int]
    tokens_left: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class MegatronPlan:
    """Next action of all ranks of a replica: add new samples, and compute a step."""

    seed: int
    begun: list[Begun]
    ended: list[int]


@dataclass(frozen=True, slots=True)
class _UnansweredRequest:
    transcripts: list[Transcript]
    answer: asyncio.Future[list[Completion]]


class MegatronEngine(LoopDriver):
    """Implements `RankEngine` with the policy's own weights, in this process or on all ranks of a replica together.

    Each phase builds an engine of megatron-core, so that nothing of it stays in memory while the ranks train.
    """

    def __init__(
        self,
        policy: Policy,
        model: ModelConfig,
        config: InferenceConfig,
        end_ids: Collection[int],
        max_length: int | None = None,
        ranks: EngineRanks | None = None,
        decode: Decode | None = None,
    ) -> None:
        """Arguments as in `Engine`. Raises ConfigurationError if megatron-core's engine cannot run here."""
        check_requirements()
        self.policy = policy
        self.policy_version = 0
        self.busy_s = 0.0
        longest = max_length or model.max_position_embeddings
        page_tokens = config.page_tokens or policy.kernels.page_tokens
        pages, _ = pages_of(config, page_tokens, -(-longest // page_tokens) * page_tokens)
        limit_name = "training.sequence_length" if max_length else "model.max_position_embeddings"
        self._limits = RequestLimits(
            policy.vocabulary,
            longest,
            limit_name,
            pages * page_tokens,
            decode is not None,
            "megatron-core's engine cannot force a form; use inference.engine=native or vllm",
        )
        self._sizes = EngineSizes(
            config.max_batch, config.prefill_tokens, longest, pages, page_tokens, config.share_prefixes
        )
        self._gpt = megatron_gpt(policy, model)
        self._end_ids = frozenset(end_ids)
        self._decode = decode
        self._plans = None if ranks is None or ranks.alone else PlanBroadcast[MegatronPlan](ranks.control)
        self._asked: dict[str, _UnansweredRequest] = {}
        self._open: dict[int, Transcript] = {}  # samples that need more tokens
        self._begun: list[int] = []
        self._ended: list[int] = []
        self._leaving: set[int] = set()  # ended samples that megatron-core's engine still has
        self._numbers = itertools.count()
        self._seed = 0
        self._core: Any = None
        self.profiler: GenerationProfiler | None = None

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Answer a request. Cancelling the caller ends its answers after the next step.

        Raises Unsupported for min_p, min_new_tokens, top_k together with top_p, and features beyond training.
        """
        beyond = request.beyond_training or beyond_megatron(request.sampling)
        if beyond:
            raise Unsupported(f"{beyond}: megatron-core's engine cannot do that; use inference.engine=native")
        self._limits.check(request)
        refuse_duplicate(request, self._asked)
        ends = self._end_ids | frozenset(request.sampling.stop_tokens)
        transcripts = [Transcript.begin(request, sample, ends, self._decode) for sample in range(request.num_samples)]
        if self._core is None and not self.busy:
            self._seed = request.key
        mine = {next(self._numbers): each for each in transcripts if each.finish_reason is None}
        answer = asyncio.get_running_loop().create_future()
        self._asked[request.id] = _UnansweredRequest(transcripts, answer)
        self._open |= mine
        self._begun += mine
        self.drive()
        try:
            return await answer
        finally:
            del self._asked[request.id]
            self._end(number for number in mine if number in self._open)

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def partial_answers(self) -> list[PartialAnswer]:
        return [
            PartialAnswer(request_id, each.sample, each.prefix())
            for request_id, asked in self._asked.items()
            for each in asked.transcripts
            if each.tokens
        ]

    def follow(self, waits: Callable[[], AbstractContextManager[None]]) -> None:
        asyncio.run(self._follow(waits))

    async def _follow(self, waits: Callable[[], AbstractContextManager[None]]) -> None:
        assert self._plans, "a single rank has no other rank to follow"
        while True:
            with waits():
                turn = self._plans.receive()
            if turn is None:
                return
            assert isinstance(turn, MegatronPlan)
            self._take(turn)
            await asyncio.sleep(0)  # run what megatron-core has scheduled in the loop

    def release_followers(self) -> None:
        if self._plans:
            self._plans.send(None)

    def end_phase(self) -> None:
        assert not self._asked, "a caller still waits for an answer, and would wait forever"
        if self.profiler is not None:
            self.profiler.end()
        self._forget()

    def _forget(self) -> None:
        if self._core is not None:
            close_dynamic_engine(self._core)
        self._core = None
        self._open, self._begun, self._ended, self._leaving = {}, [], [], set()

    def fail(self, error: Exception) -> None:
        self._forget()
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_exception(error)

    def deliver(self) -> None:
        for asked in self._asked.values():
            if not asked.answer.done() and all(each.finish_reason for each in asked.transcripts):
                asked.answer.set_result([each.completion() for each in asked.transcripts])

    def step(self) -> None:
        begun = [self._begin(number) for number in self._begun]
        turn = MegatronPlan(self._seed, begun, self._ended)
        self._begun, self._ended = [], []
        if self._plans:
            self._plans.send(turn)
        finished = self._take(turn)
        for number, transcript in list(self._open.items()):
            record = finished.get(number) or self._core.requests[number].record
            tokens, logprobs = _sampled(record, len(transcript.tokens) - _known(transcript))
            transcript.extend(RowAnswer(number, tokens, logprobs), self.policy_version)
            if transcript.finish_reason is not None:
                self._end([number])
            elif number in finished:
                raise RuntimeError(f"megatron-core's engine gave up an answer: {record.requests[-1].events}")

    def _begin(self, number: int) -> Begun:
        transcript = self._open[number]
        sampling = transcript.request.sampling
        tokens = [*transcript.request.prompt_tokens, *transcript.tokens]
        return Begun(number, tokens, sampling.max_new_tokens - len(transcript.tokens), sampling)

    def _end(self, numbers: Iterable[int]) -> None:
        for number in [*numbers]:
            del self._open[number]
            if number in self._begun:
                self._begun.remove(number)
            else:
                self._ended.append(number)

    @torch.inference_mode()
    def _take(self, turn: MegatronPlan) -> dict[int, Any]:
        started = time.perf_counter()
        if self._core is None:
            self._core = build_dynamic_engine(self._gpt, self.policy.vocabulary, self._sizes, turn.seed)
        end = min(self._end_ids)
        for each in turn.begun:
            params = sampling_params(each.sampling, each.tokens_left, end, self.policy.vocabulary)
            self._core.add_request(each.id, each.tokens, params)
        # megatron-core ends these samples as if it had found a stop word: in its next step, whose token is ignored, or
        # later, if a sample still waits or its prompt is only partly computed.
        self._leaving = {each for each in (*self._leaving, *turn.ended) if each in self._core.requests}
        self._core.stop_word_finished_request_ids |= self._leaving
        with nullcontext() if self.profiler is None else self.profiler.plan(self.policy_version):
            step = _run(self._core.async_step())
        self.busy_s += time.perf_counter() - started
        return {record.request_id: record for record in step["finished_request_records"]}


def _known(transcript: Transcript) -> int:
    known = transcript.request.known.get(transcript.sample)
    return len(known.tokens) if known else 0


def _sampled(record: Any, first: int) -> tuple[list[int], list[float]]:
    """Return the tokens from `first` on that megatron-core has drawn, and their log-probs. A record lists requests: a
    sample that was evicted continues as another request, whose prompt ends with its tokens so far."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for request in record.requests:
        if first < len(request.generated_tokens):
            tokens += request.generated_tokens[first:]
            logprobs += request.generated_log_probs[first:]
        first = max(0, first - len(request.generated_tokens))
    return tokens, logprobs


def _run(step: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits for anything else, without yielding to the loop. A task that was cancelled half
    way through a step would leave the cache in an inconsistent state."""
    try:
        while True:
            assert step.send(None) is None, "megatron-core's engine waits for something, which this loop cannot do"
    except StopIteration as end:
        return end.value
