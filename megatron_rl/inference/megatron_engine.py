"""megatron-core's dynamic engine behind the interface of this project's own.

megatron-core's schedules, keeps the cache, computes and draws; here is what it lacks: answers that are gone on with,
several tokens and strings that end one, policy versions, and ranks in step without sockets. What is used of it here is
the same in 0.16.1 and 0.19; how it is built is not, and is said in megatron_parts.py.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.inference.api import Completion, GenerationRequest, PartialAnswer, Unsupported
from megatron_rl.inference.broadcast import PlanBroadcast
from megatron_rl.inference.config import InferenceConfig, Sampling, beyond_megatron, pages_of
from megatron_rl.inference.engine import LoopDriver
from megatron_rl.inference.megatron_parts import (
    EngineSizes,
    build_dynamic_engine,
    check_requirements,
    close_dynamic_engine,
    sampling_params,
)
from megatron_rl.inference.request_limits import RequestLimits, refuse_duplicate
from megatron_rl.inference.text import Decode
from megatron_rl.inference.transcript import RowAnswer, Transcript
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.megatron_gpt import megatron_gpt
from megatron_rl.model.policy import Policy
from megatron_rl.rank.engine_ranks import EngineRanks


@dataclass(frozen=True, slots=True)
class Begun:
    """A sample that megatron-core's engine is to answer."""

    id: int
    tokens: list[int]
    """Its prompt, and what is known of the answer."""
    tokens_left: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Turn:
    """What all ranks of a replica do next: take over what is new, and compute a step."""

    seed: int
    """Of all that is drawn in this phase."""
    begun: list[Begun]
    ended: list[int]
    """Samples that need no more tokens."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that is not answered."""

    transcripts: list[Transcript]
    answer: asyncio.Future[list[Completion]]


class MegatronEngine:
    """Implements `RankEngine` over a policy of this process, or of the ranks of a replica together, by its own weights.

    Each phase has an engine of megatron-core of its own, so that nothing of it stays while the ranks train.
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
        """Arguments are those of `Engine`. Raises ConfigurationError where megatron-core's cannot run here."""
        check_requirements()
        self.policy = policy
        self.policy_version = 0
        """Of the weights that the next tokens are drawn by."""
        self.busy_s = 0.0
        """Seconds spent generating so far."""
        longest = max_length or model.max_position_embeddings
        page_tokens = config.page_tokens or policy.platform.page_tokens
        pages, _ = pages_of(config, page_tokens, -(-longest // page_tokens) * page_tokens)
        limit_name = "training.sequence_length" if max_length else "model.max_position_embeddings"
        self._limits = RequestLimits(policy.vocabulary, longest, limit_name, pages * page_tokens, decode is not None)
        self._sizes = EngineSizes(
            config.max_batch, config.prefill_tokens, longest, pages, page_tokens, config.share_prefixes
        )
        self._twin = megatron_gpt(policy, model)
        self._end_ids = frozenset(end_ids)
        self._decode = decode
        self._plans = None if ranks is None or ranks.alone else PlanBroadcast[Turn](ranks.control)
        self._asked: dict[str, _Asked] = {}
        self._open: dict[int, Transcript] = {}  # samples that need more tokens
        self._begun: list[int] = []
        self._ended: list[int] = []
        self._leaving: set[int] = set()  # ended, and still known to megatron-core's engine
        self._numbers = itertools.count()
        self._seed = 0
        self._core: Any = None
        self._driver = LoopDriver(self)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """See `InferenceInterface.generate`. A caller that is cancelled costs his answers' next token and no more.

        Raises Unsupported for min_p, min_new_tokens, top_k together with top_p, and what is beyond training.
        """
        beyond = request.beyond_training or beyond_megatron(request.sampling)
        if beyond:
            raise Unsupported(f"{beyond}: megatron-core's engine cannot")
        self._limits.check(request)
        refuse_duplicate(request, self._asked)
        ends = self._end_ids | frozenset(request.sampling.stop_tokens)
        transcripts = [Transcript.begin(request, sample, ends, self._decode) for sample in range(request.num_samples)]
        if self._core is None and not self.busy:
            self._seed = request.key
        mine = {next(self._numbers): each for each in transcripts if each.finish_reason is None}
        answer = asyncio.get_running_loop().create_future()
        self._asked[request.id] = _Asked(transcripts, answer)
        self._open |= mine
        self._begun += mine
        self._driver.start()
        try:
            return await answer
        finally:
            del self._asked[request.id]
            self._end(number for number in mine if number in self._open)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._open)

    def partial_answers(self) -> list[PartialAnswer]:
        """See `ResumableInference.partial_answers`."""
        return [
            PartialAnswer(request_id, each.sample, each.prefix())
            for request_id, asked in self._asked.items()
            for each in asked.transcripts
            if each.tokens
        ]

    def follow(self, waits: Callable[[], AbstractContextManager[None]]) -> None:
        """See `RankEngine.follow`."""
        asyncio.run(self._follow(waits))

    async def _follow(self, waits: Callable[[], AbstractContextManager[None]]) -> None:
        assert self._plans, "a rank that has all of the policy has nobody to follow"
        while True:
            with waits():
                turn = self._plans.receive()
            if turn is None:
                return
            assert isinstance(turn, Turn)
            self._take(turn)
            await asyncio.sleep(0)  # what megatron-core asks of the loop is done

    def let_go(self) -> None:
        """See `RankEngine.let_go`."""
        if self._plans:
            self._plans.send(None)

    def end_phase(self) -> None:
        """See `RankEngine.end_phase`."""
        assert not self._asked, "who waits for an answer would wait for ever"
        self._forget()

    def _forget(self) -> None:
        if self._core is not None:
            close_dynamic_engine(self._core)
        self._core = None
        self._open, self._begun, self._ended, self._leaving = {}, [], [], set()

    def fail(self, error: Exception) -> None:
        """See `Driven.fail`."""
        self._forget()
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_exception(error)

    def deliver(self) -> None:
        """See `Driven.deliver`."""
        for asked in self._asked.values():
            if not asked.answer.done() and all(each.finish_reason for each in asked.transcripts):
                asked.answer.set_result([each.completion() for each in asked.transcripts])

    def step(self) -> None:
        """One token for every row."""
        begun = [self._begin(number) for number in self._begun]
        turn = Turn(self._seed, begun, self._ended)
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
                raise RuntimeError(f"megatron-core's engine gave an answer up: {record.requests[-1].events}")

    def _begin(self, number: int) -> Begun:
        transcript = self._open[number]
        sampling = transcript.request.sampling
        tokens = [*transcript.request.prompt_tokens, *transcript.tokens]
        return Begun(number, tokens, sampling.max_new_tokens - len(transcript.tokens), sampling)

    def _end(self, numbers: Iterable[int]) -> None:
        """Compute no more of these samples."""
        for number in [*numbers]:
            del self._open[number]
            if number in self._begun:
                self._begun.remove(number)
            else:
                self._ended.append(number)

    @torch.inference_mode()
    def _take(self, turn: Turn) -> dict[int, Any]:
        """Execute a turn, on every rank. Returns megatron-core's records of the samples that it has ended."""
        started = time.perf_counter()
        if self._core is None:
            self._core = build_dynamic_engine(self._twin, self.policy.vocabulary, self._sizes, turn.seed)
        end = min(self._end_ids)
        for each in turn.begun:
            params = sampling_params(each.sampling, each.tokens_left, end, self.policy.vocabulary)
            self._core.add_request(each.id, each.tokens, params)
        # As if a stop word had been found: it ends them in its next step, whose token counts no more; later, where one
        # still waits or its prompt is computed in part.
        self._leaving = {each for each in (*self._leaving, *turn.ended) if each in self._core.requests}
        self._core.stop_word_finished_request_ids |= self._leaving
        step = _run(self._core.async_step())
        self.busy_s += time.perf_counter() - started
        return {record.request_id: record for record in step["finished_request_records"]}


def _known(transcript: Transcript) -> int:
    """Tokens of an answer that an earlier attempt sampled."""
    known = transcript.request.known.get(transcript.sample)
    return len(known.tokens) if known else 0


def _sampled(record: Any, first: int) -> tuple[list[int], list[float]]:
    """Tokens from `first` on that megatron-core's engine has drawn, and their log-probs. A record lists requests: what
    gave way to others goes on as another one, whose prompt ends with what there was of its answer."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for request in record.requests:
        if first < len(request.generated_tokens):
            tokens += request.generated_tokens[first:]
            logprobs += request.generated_log_probs[first:]
        first = max(0, first - len(request.generated_tokens))
    return tokens, logprobs


def _run(step: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing but its turn. Nobody else has one meanwhile: who is cancelled
    halfway through a step would leave the cache between two of its states."""
    try:
        while True:
            assert step.send(None) is None, "megatron-core's engine waits for something"
    except StopIteration as end:
        return end.value
