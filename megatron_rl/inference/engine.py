"""The in-process engine: a scheduler and a model runner that live as long as the rank.

    submit(request) -> id    step()    take(id) -> completions      the caller drives it; or take_deltas()
    generate(request)    stream(request)                            an asyncio loop calls and drives it
    follow()                                                        on the other ranks of a replica

Several asyncio loops may use it in turn: the calling loop drives it until no work is left, and agents run between two
steps. If a replica has several ranks, callers use the first one; the others execute its plans until it releases them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractContextManager, nullcontext

from megatron_rl.inference.api import (
    Completion,
    Delta,
    EngineLoad,
    GenerationRequest,
    PartialAnswer,
    Unsupported,
)
from megatron_rl.inference.broadcast import PlanBroadcast
from megatron_rl.inference.cache import KeyValueCache
from megatron_rl.inference.config import InferenceConfig, pages_of
from megatron_rl.inference.loop_driver import LoopDriver
from megatron_rl.inference.model_runner import ModelRunner
from megatron_rl.inference.pages import Pages
from megatron_rl.inference.request_limits import RequestLimits, refuse_duplicate
from megatron_rl.inference.scheduler import Scheduler, StepPlan
from megatron_rl.inference.text import Decode
from megatron_rl.inference.transcript import RowAnswer
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.policy import Policy
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.profiler import GenerationProfiler


class Engine:
    """Implements `RankEngine` and `StreamingInference` over a policy of this process, or of all ranks of a replica
    together."""

    def __init__(
        self,
        policy: Policy,
        model: ModelConfig,
        config: InferenceConfig,
        end_ids: Collection[int],
        max_length: int | None = None,
        ranks: EngineRanks | None = None,
        keeps_cache: bool = True,
        decode: Decode | None = None,
    ) -> None:
        """
        end_ids: tokens that end any answer, at least one.
        max_length: tokens of a prompt and its answer together; default: all positions of the model.
        ranks: ranks that hold the policy together; None: this rank holds all of it.
        keeps_cache: whether the cache stays in memory between phases of generation.
        decode: tokens to text, for stop strings.
        """
        self.policy = policy
        """Samples the tokens. refit.publish updates its weights."""
        self.busy_s = 0.0
        """Seconds spent generating so far; the rest of a caller's wait is for other work, such as rewards."""
        self.max_length = max_length or model.max_position_embeddings
        count, page_tokens = pages_of(config, config.page_tokens or policy.platform.page_tokens, self.max_length)
        self._pages = Pages(count, page_tokens, reusable=config.share_prefixes)
        self._scheduler = Scheduler(config, self._pages, end_ids, decode)
        self._runner = ModelRunner(policy, model, config, (count, page_tokens), end_ids, self.max_length)
        self._keeps_cache = keeps_cache
        limit_name = "training.sequence_length" if max_length else "model.max_position_embeddings"
        cache_tokens = count * page_tokens
        self._limits = RequestLimits(policy.vocabulary, self.max_length, limit_name, cache_tokens, decode is not None)
        self._plans = None if ranks is None or ranks.alone else PlanBroadcast[StepPlan](ranks.control)
        self._callers: dict[str, asyncio.Future[list[Completion]]] = {}
        self._streams: dict[str, asyncio.Queue[Delta | Exception]] = {}
        self._driver = LoopDriver(self)
        self.profiler: GenerationProfiler | None = None

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps behind the weights. refit.publish sets it after the weights; unfinished answers
        continue with them."""
        return self._scheduler.policy_version

    @policy_version.setter
    def policy_version(self, policy_version: int) -> None:
        sampled = self._new_tokens()
        if self.profiler is not None:
            self.profiler.end()
        self._scheduler.publish(policy_version, sampled)
        self._runner.weights_changed()

    def submit(self, request: GenerationRequest, *, streamed: bool = False) -> str:
        """Queue a request. Returns its id. Raises as `InferenceInterface.generate` does.

        streamed: report the request by `take_deltas` instead of `take`.
        """
        self._check(request)
        self._scheduler.submit(request, streamed=streamed)
        return request.id

    def _check(self, request: GenerationRequest) -> None:
        """Raise if the request cannot be answered."""
        if request.top_logprobs and request.known:
            raise Unsupported("top_logprobs: the known tokens of an interrupted answer have none")
        self._limits.check(request)
        refuse_duplicate(request, self._callers)
        refuse_duplicate(request, self._streams)

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its rows. No-op if it is answered or unknown."""
        self._scheduler.cancel(request_id)

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return self._scheduler.busy

    @property
    def load(self) -> EngineLoad:
        return self._scheduler.load

    def step(self) -> None:
        """Compute one token for every row, then admit what fits. Any exception fails every request."""
        try:
            while (row := self._scheduler.row_to_evict()) is not None:
                self._scheduler.evict(row, self._runner.answers(self._scheduler.wanted([row])))
            for plan_next in (self._scheduler.decode, self._scheduler.admit):
                if plan := plan_next():
                    started = time.perf_counter()
                    self._execute(plan)
                    self.busy_s += time.perf_counter() - started
        except BaseException:
            self._scheduler.clear()
            raise

    def _execute(self, plan: StepPlan) -> None:
        if self._plans:
            self._plans.send(plan)
        with self._profiled():
            ended = self._runner.execute(plan)
        if self._runner.scores:
            self._scheduler.take_scores(self._runner.scores)
        if ended is not None and (wanted := self._scheduler.wanted(ended)):
            self._scheduler.retire(self._runner.answers(wanted))

    def _profiled(self) -> AbstractContextManager[None]:
        return nullcontext() if self.profiler is None else self.profiler.plan(self.policy_version)

    def _new_tokens(self) -> list[RowAnswer]:
        """Return the tokens of all rows that the scheduler does not know yet."""
        return self._runner.answers(self._scheduler.wanted(self._scheduler.rows))

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of prompts and of resumed answers computed so far; tokens found in the cache do not count."""
        return self._scheduler.prefilled_tokens

    def follow(self, waits: Callable[[], AbstractContextManager[None]]) -> None:
        """Execute the plans of the replica's first rank, until it releases its followers.

        waits: context entered while this rank waits for the next plan.
        """
        assert self._plans, "a single rank has no other rank to follow"
        while True:
            with waits():
                plan = self._plans.receive()
            if plan is None:
                return
            started = time.perf_counter()
            with self._profiled():
                self._runner.execute(plan)
            self.busy_s += time.perf_counter() - started

    @property
    def cache(self) -> KeyValueCache | None:
        """Keys and values of all pages; None while it is not allocated."""
        return self._runner.cache

    def end_phase(self) -> None:
        """Make room for training, on each rank of the replica. Unfinished answers wait, to resume from their tokens."""
        if self.profiler is not None:
            self.profiler.end()
        self.restart_rows()
        self._scheduler.forget()  # a phase must compute the same whatever the phase before it computed
        self._runner.forget_weights()
        if not self._keeps_cache:
            self._runner.release()

    def restart_rows(self) -> None:
        """Make all rows resume from their tokens, with recomputed keys and values."""
        self._scheduler.restart_rows(self._new_tokens())

    def release_followers(self) -> None:
        """Make the other ranks of the replica return from `follow`. No-op on a single rank."""
        if self._plans:
            self._plans.send(None)

    @property
    def answered(self) -> list[str]:
        """Ids of requests whose completions can be taken."""
        return list(self._scheduler.answered)

    def take(self, request_id: str) -> list[Completion] | None:
        """Return the completions of a request in sample order, only once; None if it is not answered."""
        return self._scheduler.answered.pop(request_id, None)

    def take_deltas(self) -> list[tuple[str, Delta]]:
        """Return the new tokens of all streamed requests since the last call, with the request ids."""
        deltas, self._scheduler.deltas = self._scheduler.deltas, []
        return deltas

    def partial_answers(self) -> list[PartialAnswer]:
        return self._scheduler.partial_answers(self._new_tokens())

    # Use from an asyncio loop

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        request_id = self.submit(request)
        answer = self._callers[request_id] = asyncio.get_running_loop().create_future()
        self._driver.start()
        try:
            return await answer
        finally:
            del self._callers[request_id]
            self.cancel(request_id)

    def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        self._check(request)
        return self._stream(request)

    async def _stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        self.submit(request, streamed=True)
        deltas = self._streams[request.id] = asyncio.Queue()
        self._driver.start()
        unfinished = request.num_samples
        try:
            while unfinished:
                delta = await deltas.get()
                if isinstance(delta, Exception):
                    raise delta
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            del self._streams[request.id]
            self.cancel(request.id)

    def fail(self, error: Exception) -> None:
        for answer in self._callers.values():
            if not answer.done():
                answer.set_exception(error)
        for stream in self._streams.values():
            stream.put_nowait(error)

    def deliver(self) -> None:
        for request_id in [each for each in self.answered if each in self._callers]:
            if not (answer := self._callers[request_id]).done():
                answer.set_result(self._scheduler.answered.pop(request_id))
        for request_id, delta in self.take_deltas():
            if request_id in self._streams:
                self._streams[request_id].put_nowait(delta)
