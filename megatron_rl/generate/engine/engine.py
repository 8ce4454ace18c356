"""The in-process engine: a scheduler and a model runner that live as long as the rank.

    submit(request) -> id    step()    take(id) -> completions      the caller drives it; or take_deltas()
    generate(request)    stream(request)                            an asyncio loop calls and drives it
    follow()                                                        on the other ranks of a replica

Several asyncio loops may use it in turn: the calling loop drives it until no work is left, and agents run between two
steps. If a replica has several ranks, callers use the first one; the others execute its plans until it releases them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

from megatron_rl.generate.engine.broadcast import PlanBroadcast
from megatron_rl.generate.engine.interface import (
    Completion,
    Delta,
    EngineLoad,
    GenerationRequest,
    PartialAnswer,
    Unsupported,
)
from megatron_rl.generate.engine.loop_driver import LoopCallers
from megatron_rl.generate.engine.model_runner import ModelRunner
from megatron_rl.generate.engine.pages import Pages
from megatron_rl.generate.engine.request_limits import RequestLimits
from megatron_rl.generate.engine.scheduler import Scheduler, StepPlan
from megatron_rl.generate.engine.transcript import RowAnswer
from megatron_rl.model.grammar import NoGrammars
from megatron_rl.model.policy import Policy
from megatron_rl.model.text_stream import Decode
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.profiler import GenerationProfiler
from megatron_rl.recipe.inference import InferenceConfig, pages_of
from megatron_rl.recipe.model import ModelConfig


class Engine:
    """Implements `RankEngine` over a policy of this process, or of all ranks of a replica
    together."""

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
        """
        end_ids: tokens that end any answer, at least one.
        max_length: tokens of a prompt and its answer together; default: all positions of the model.
        ranks: ranks that hold the policy together; None: this rank holds all of it.
        decode: tokens to text, for stop strings.
        """
        self.policy = policy
        self.busy_s = 0.0
        """Seconds spent generating so far; the rest of a caller's wait is for other work, such as rewards."""
        self.max_length = max_length or model.max_position_embeddings
        count, page_tokens = pages_of(config, config.page_tokens or policy.kernels.page_tokens, self.max_length)
        self._pages = Pages(count, page_tokens, reusable=config.share_prefixes and not policy.recurrent)
        if policy.recurrent:  # see delta_states.py
            config = config.model_copy(update={"prefill_tokens": max(config.prefill_tokens, self.max_length)})
        self.scheduler = Scheduler(config, self._pages, end_ids, decode, whole=policy.recurrent)
        self.runner = ModelRunner(policy, model, config, (count, page_tokens), end_ids, self.max_length)
        self.grammars = self.runner.grammars
        """Grammars into which answers may be forced, if its `source` is set, on every rank."""
        self.keeps_cache = True
        limit_name = "training.sequence_length" if max_length else "model.max_position_embeddings"
        cache_tokens = count * page_tokens
        self._limits = RequestLimits(policy.vocabulary, self.max_length, limit_name, cache_tokens, decode is not None)
        self._plans = None if ranks is None or ranks.alone else PlanBroadcast[StepPlan](ranks.control)
        self.callers = LoopCallers(self)
        self.profiler: GenerationProfiler | None = None

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps behind the weights. refit.publish sets it after the weights; unfinished answers
        continue with them."""
        return self.scheduler.policy_version

    @policy_version.setter
    def policy_version(self, policy_version: int) -> None:
        sampled = self._new_tokens()
        if self.profiler is not None:
            self.profiler.end()
        self.scheduler.publish(policy_version, sampled)
        self.runner.weights_changed()

    def submit(self, request: GenerationRequest, *, streamed: bool = False) -> str:
        """Queue a request. Returns its id. Raises as `InferenceInterface.generate` does.

        streamed: report the request by `take_deltas` instead of `take`.
        """
        self.check(request)
        self.scheduler.submit(request, streamed=streamed)
        return request.id

    def check(self, request: GenerationRequest) -> None:
        if request.top_logprobs and request.known:
            raise Unsupported("top_logprobs: the known tokens of an interrupted answer have none")
        if request.grammar:
            if self.grammars.source is None:
                raise Unsupported("tool_choice, response_format: this engine has no tokenizer, which they need")
            try:
                self.grammars.source.check(request.grammar)
            except NoGrammars as missing:
                raise Unsupported(f"tool_choice, response_format: {missing}") from missing
        self._limits.check(request)

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its rows. No-op if it is answered or unknown."""
        self.scheduler.cancel(request_id)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    @property
    def load(self) -> EngineLoad:
        return self.scheduler.load

    def step(self) -> None:
        """Compute one token for every row, then admit what fits. Any exception fails every request."""
        try:
            while (row := self.scheduler.row_to_evict()) is not None:
                self.scheduler.evict(row, self.runner.answers(self.scheduler.wanted([row])))
            for plan_next in (self.scheduler.decode, self.scheduler.admit):
                if (plan := plan_next()) is None:
                    continue
                started = time.perf_counter()
                if self._plans:
                    self._plans.send(plan)
                with self._profiled():
                    ended = self.runner.execute(plan)
                if self.runner.scores:
                    self.scheduler.take_scores(self.runner.scores)
                if ended is not None and (wanted := self.scheduler.wanted(ended)):
                    self.scheduler.retire(self.runner.answers(wanted))
                self.busy_s += time.perf_counter() - started
        except BaseException:
            self.scheduler.clear()
            raise

    def _profiled(self) -> AbstractContextManager[None]:
        return nullcontext() if self.profiler is None else self.profiler.plan(self.policy_version)

    def _new_tokens(self) -> list[RowAnswer]:
        return self.runner.answers(self.scheduler.wanted(self.scheduler.rows))

    def follow(self, waits: Callable[[], AbstractContextManager[None]]) -> None:
        assert self._plans, "a single rank has no other rank to follow"
        while True:
            with waits():
                plan = self._plans.receive()
            if plan is None:
                return
            started = time.perf_counter()
            with self._profiled():
                self.runner.execute(plan)
            self.busy_s += time.perf_counter() - started

    def end_phase(self) -> None:
        if self.profiler is not None:
            self.profiler.end()
        self.restart_rows()
        self.scheduler.forget()  # a phase must compute the same whatever the previous phase computed
        self.runner.forget_weights()
        if not self.keeps_cache:
            self.runner.release()

    def restart_rows(self) -> None:
        self.scheduler.restart_rows(self._new_tokens())

    def release_followers(self) -> None:
        if self._plans:
            self._plans.send(None)

    @property
    def answered(self) -> list[str]:
        return list(self.scheduler.answered)

    def take(self, request_id: str) -> list[Completion] | None:
        """Return the completions of a request in sample order, only once; None if it is not answered."""
        return self.scheduler.answered.pop(request_id, None)

    def take_deltas(self) -> list[tuple[str, Delta]]:
        deltas, self.scheduler.deltas = self.scheduler.deltas, []
        return deltas

    def partial_answers(self) -> list[PartialAnswer]:
        return self.scheduler.partial_answers(self._new_tokens())

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        return await self.callers.generate(request)
