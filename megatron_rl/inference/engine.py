"""The in-process engine: a scheduler and a model runner that live as long as the rank.

    submit(request) -> id    step()    take(id) -> completions      for a caller that drives it; or take_deltas()
    generate(request)    stream(request)                            from an asyncio loop, which then drives it
    update_weights(version, tensors)                                between two tokens, where the weights are its own
    follow()                                                        on the other ranks of a replica

No loop owns it: whichever asks drives it until nothing is left to do, and agents run between two steps. Where a replica
is several ranks the first one is asked, and the others execute what it does until it lets them go.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from megatron_rl.inference.api import (
    Completion,
    Delta,
    EngineLoad,
    GenerationRequest,
    PartialAnswer,
    Unsupported,
)
from megatron_rl.inference.cache import KeyValueCache
from megatron_rl.inference.config import InferenceConfig, pages_of
from megatron_rl.inference.model_runner import ModelRunner
from megatron_rl.inference.pages import Pages
from megatron_rl.inference.plans import PlanBroadcast, StepPlan, TensorPlan
from megatron_rl.inference.request_limits import RequestLimits, refuse_duplicate
from megatron_rl.inference.scheduler import Scheduler
from megatron_rl.inference.text import Decode
from megatron_rl.inference.transcript import RowAnswer
from megatron_rl.inference.weights import IncomingWeights
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.policy import Policy
from megatron_rl.rank.engine_ranks import EngineRanks


class Engine:
    """Implements `RankEngine`, `StreamingInference` and `UpdatableInference` over a policy of this process, or
    of the ranks of a replica together."""

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
        max_length: of a prompt and its answer together; by default all positions of the model.
        ranks: those that hold the policy together; None: this one has all of it.
        keeps_cache: whether the cache stays in memory from one phase of generation to the next.
        decode: tokens to text, for stop strings.
        """
        self.policy = policy
        """Samples; see refit.publish for where its weights are from."""
        self.busy_s = 0.0
        """Seconds spent generating so far; the rest of a caller's wait is for something else, such as rewards."""
        self.max_length = max_length or model.max_position_embeddings
        count, page_tokens = pages_of(config, config.page_tokens or policy.platform.page_tokens, self.max_length)
        self._pages = Pages(count, page_tokens, found_again=config.share_prefixes)
        self._scheduler = Scheduler(config, self._pages, end_ids, decode)
        self._runner = ModelRunner(policy, model, config, (count, page_tokens), end_ids, self.max_length)
        self._keeps_cache = keeps_cache
        self._model = model
        self._half_updated = False
        limit_name = "training.sequence_length" if max_length else "model.max_position_embeddings"
        cache_tokens = count * page_tokens
        self._limits = RequestLimits(policy.vocabulary, self.max_length, limit_name, cache_tokens, decode is not None)
        self._plans = None if ranks is None or ranks.alone else PlanBroadcast[StepPlan](ranks.control)
        self._callers: dict[str, asyncio.Future[list[Completion]]] = {}
        self._streams: dict[str, asyncio.Queue[Delta | Exception]] = {}
        self._pump = Pump(self)

    @property
    def policy_version(self) -> int:
        """See `ResumableInference.policy_version`. Set by refit.publish, once the weights are those of that version;
        answers under way go on with them."""
        return self._scheduler.policy_version

    @policy_version.setter
    def policy_version(self, policy_version: int) -> None:
        self._publish(policy_version, self._new_tokens())

    def _publish(self, policy_version: int, sampled: list[RowAnswer]) -> None:
        self._scheduler.publish(policy_version, sampled)
        self._runner.weights_changed()

    def submit(self, request: GenerationRequest, *, streamed: bool = False) -> str:
        """Queue a request. Returns its id. Raises as `InferenceInterface.generate` does.

        streamed: told of by `take_deltas`, instead of `take`.
        """
        self._check(request)
        self._scheduler.submit(request, streamed=streamed)
        return request.id

    def _check(self, request: GenerationRequest) -> None:
        """Raise where the request cannot be answered."""
        if self._half_updated:
            raise RuntimeError(
                "the weights were not replaced as a whole: update_weights must be called with all of them"
            )
        if request.top_logprobs and any(known.top_logprobs is None for known in request.known.values()):
            raise Unsupported("top_logprobs: an interrupted answer's first tokens came without theirs")
        self._limits.check(request)
        refuse_duplicate(request, self._callers)
        refuse_duplicate(request, self._streams)

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its rows; one that is answered or unknown is none."""
        self._scheduler.cancel(request_id)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return self._scheduler.busy

    @property
    def load(self) -> EngineLoad:
        """How much there is to do."""
        return self._scheduler.load

    def step(self) -> None:
        """One token for every row, then admit what fits. Whatever it raises has cost all requests."""
        try:
            while (place := self._scheduler.must_give_way()) is not None:
                self._scheduler.give_way(place, self._runner.answers(self._scheduler.wanted([place])))
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
        ended = self._runner.execute(plan)
        if self._runner.scores:
            self._scheduler.take_scores(self._runner.scores)
        if ended is not None and (wanted := self._scheduler.wanted(ended)):
            self._scheduler.retire(self._runner.answers(wanted))

    def _new_tokens(self) -> list[RowAnswer]:
        """Of all rows, what the scheduler does not know yet."""
        return self._runner.answers(self._scheduler.wanted(self._scheduler.rows))

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of prompts, and of answers that were gone on with, computed so far; those that were found are not."""
        return self._scheduler.prefilled_tokens

    def follow(self, waits: Callable[[], AbstractContextManager[None]]) -> None:
        """Execute what the first rank of the replica does, until it lets the others go.

        waits: what to enter while this rank waits for the next plan.
        """
        assert self._plans, "a rank that has all of the policy has nobody to follow"
        incoming: IncomingWeights | None = None
        while True:
            with waits():
                plan = self._plans.receive()
            if plan is None:
                return
            started = time.perf_counter()
            if isinstance(plan, TensorPlan):
                incoming = incoming or IncomingWeights(self.policy, self._model)
                incoming.put(plan.name, self._plans.receive_tensor(plan))
            else:
                incoming = None
                self._runner.execute(plan)
            self.busy_s += time.perf_counter() - started

    @property
    def cache(self) -> KeyValueCache | None:
        """Keys and values of all pages, while there is room for them."""
        return self._runner.cache

    def end_phase(self) -> None:
        """Make room for training, on each rank of the replica. What is under way waits, to go on from its tokens."""
        self.begin_rows_again()
        self._scheduler.forget()  # what the next phase computes does not depend on what was asked in this one
        self._runner.forget_weights()
        if not self._keeps_cache:
            self._runner.release()

    def begin_rows_again(self) -> None:
        """Have all rows go on from their tokens, with keys and values computed anew."""
        self._scheduler.begin_rows_again(self._new_tokens())

    def let_go(self) -> None:
        """Have the other ranks of the replica, which follow this one, return; nothing where there are none."""
        if self._plans:
            self._plans.send(None)

    @property
    def answered(self) -> list[str]:
        """Requests whose completions can be taken."""
        return list(self._scheduler.answered)

    def take(self, request_id: str) -> list[Completion] | None:
        """The completions of a request, in sample order, and only once; None where there are none yet."""
        return self._scheduler.answered.pop(request_id, None)

    def take_deltas(self) -> list[tuple[str, Delta]]:
        """What all streamed requests have got since they were taken before, by the requests' ids."""
        deltas, self._scheduler.deltas = self._scheduler.deltas, []
        return deltas

    def partial_answers(self) -> list[PartialAnswer]:
        """See `ResumableInference.partial_answers`."""
        return self._scheduler.partial_answers(self._new_tokens())

    async def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `UpdatableInference.update_weights`. Answers under way go on with the new weights. Where the replica is
        several ranks, the others follow this one.

        Raises Unsupported where the weights are the trainer's own, and WrongWeights where the tensors are not those of
        the model. What was asked has then failed, and nothing is answered before all of them have come.
        """
        incoming = IncomingWeights(self.policy, self._model)
        sampled = self._new_tokens()
        self._half_updated = True
        try:
            for name, tensor in tensors:
                if incoming.check(name, tensor):
                    if self._plans:
                        self._plans.send_tensor(name, tensor)
                    incoming.put(name, tensor)
            incoming.finish()
        except BaseException as error:
            self._scheduler.clear()
            self.fail(error if isinstance(error, Exception) else RuntimeError("new weights did not come to their end"))
            raise
        self._half_updated = False
        self._publish(version, sampled)

    # Asked from an asyncio loop

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """See `InferenceInterface.generate`. A caller that is cancelled leaves nothing behind."""
        request_id = self.submit(request)
        answer = self._callers[request_id] = asyncio.get_running_loop().create_future()
        self._pump.start()
        try:
            return await answer
        finally:
            del self._callers[request_id]
            self.cancel(request_id)

    def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """See `StreamingInference.stream`."""
        self._check(request)
        return self._stream(request)

    async def _stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        self.submit(request, streamed=True)
        deltas = self._streams[request.id] = asyncio.Queue()
        self._pump.start()
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
        """See `Driven.fail`."""
        for answer in self._callers.values():
            if not answer.done():
                answer.set_exception(error)
        for stream in self._streams.values():
            stream.put_nowait(error)

    def deliver(self) -> None:
        """See `Driven.deliver`."""
        for request_id in [each for each in self.answered if each in self._callers]:
            if not (answer := self._callers[request_id]).done():
                answer.set_result(self._scheduler.answered.pop(request_id))
        for request_id, delta in self.take_deltas():
            if request_id in self._streams:
                self._streams[request_id].put_nowait(delta)


class Driven(Protocol):
    """What is driven."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        ...

    def step(self) -> None: ...

    def deliver(self) -> None:
        """Tell who waits what is known by now."""
        ...

    def fail(self, error: Exception) -> None:
        """Tell all who wait that a step has failed."""
        ...


class Pump:
    """Drives one engine. No loop owns it: that of one phase may have ended with work undone."""

    def __init__(self, engine: Driven) -> None:
        self._engine = engine
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Have the running loop drive the engine, if it does not yet."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._work())

    async def _work(self) -> None:
        self._engine.deliver()  # what was known to its end
        while self._engine.busy:
            await asyncio.sleep(0)
            try:
                self._engine.step()
            except Exception as error:  # noqa: BLE001 - nobody awaits this task: each caller raises it
                self._engine.fail(error)
                return
            self._engine.deliver()
