"""The ranks of a replica with this project's engine: the first one gets the requests and commands the others."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from megatron_rl.generate.engine.broadcast import PlanBroadcast
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.engine_thread import EngineThread
from megatron_rl.generate.engine.interface import (
    AnswerPrefix,
    Completion,
    Delta,
    EngineLoad,
    GenerationRequest,
    TokenScore,
)
from megatron_rl.generate.engine.transcript import NOTHING, Amount
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.refit.replica_control import TRANSFER_TIMEOUT
from megatron_rl.generate.replica.driver_inbox import OpenRequest
from megatron_rl.generate.replica.lifecycle import STOP_S, first_of
from megatron_rl.generate.replica.replica_leader import TakesTurns
from megatron_rl.generate.replica.weights import ReceivedWeights
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.recipe.inference import Sampling

logger = logging.getLogger(__name__)

NEXT_S = TRANSFER_TIMEOUT.total_seconds()
"""Seconds after weights have arrived in which their swap must be requested; then the transfer counts as given up."""
REPORT_EVERY_S = 1.0
"""Seconds between two reports of unfinished answers; each synchronises the device with the host."""
WAIT_EVERY_S = 5.0
"""Seconds between two signs of life for the other ranks."""


@dataclass(frozen=True, slots=True)
class Command:
    """generate: follow the engine until it releases its followers. wait: do nothing, a sign of life. end: leave the
    replica. Others: the method of ReceivedWeights, with its arguments."""

    name: Literal["generate", "wait", "end", "receive", "swap"]
    arguments: tuple[Any, ...] = ()


def commands_over(ranks: EngineRanks) -> PlanBroadcast[Command] | None:
    """Return the channel from the first rank of a replica to the others; None if there are none."""
    return None if ranks.alone else PlanBroadcast[Command](ranks.control)


def follow(
    commands: PlanBroadcast[Command], engine: Engine, weights: ReceivedWeights | None, activity: Activity
) -> None:
    """Execute the first rank's commands, up to and including `end`. Raises RuntimeError if that rank is gone.

    weights: None for a model that does not change.
    """
    while True:
        with activity.waits():
            command = commands.receive()
        assert isinstance(command, Command), "the first rank of a replica sends nothing else"
        if command.name == "end":
            return
        if command.name == "generate":
            engine.follow(activity.waits)
        elif command.name != "wait":
            try:
                carry_out(command, weights)
            except RuntimeError as error:  # the first rank gets the same error, and reports it
                logger.warning("%s", error)


def carry_out(command: Command, weights: ReceivedWeights | None) -> Future[None]:
    """Execute this rank's part of a command about weights. Raises RuntimeError."""
    assert weights is not None, "these weights do not change"
    begun: Future[None] = getattr(weights, command.name)(*command.arguments)
    return begun


class Leader:
    """Implements `SteppedEngine` on the first rank. All methods belong to the engine's thread.

    Requests are reported as deltas: finished ones at once, the others every REPORT_EVERY_S.
    """

    def __init__(
        self,
        engine: Engine,
        weights: ReceivedWeights | None,
        commands: PlanBroadcast[Command] | None,
        activity: Activity,
        report_every_s: float = REPORT_EVERY_S,
        *,
        holds: bool = False,
    ) -> None:
        """
        weights: None for a model that does not change.
        holds: whether the engine pauses while weights are on their way, see generate/refit/overlapped.py.
        """
        self.version: int | None = None
        self._engine, self._weights, self._commands, self._activity = engine, weights, commands, activity
        self._report_every_s = report_every_s
        self._holds = holds
        self._transfer: Future[None] | None = None  # of weights for which the engine pauses
        self._next_by = 0.0  # when their swap must have been requested
        self._followed = False  # whether the other ranks follow the engine
        self._reported: dict[str, list[Amount]] = {}  # what was reported of each sample
        self._reported_at = time.monotonic()

    @property
    def busy(self) -> bool:
        return not self._held and (self._engine.busy or bool(self._engine.answered))

    @property
    def _held(self) -> bool:
        """Whether the engine must pause. It does not for weights that fail to arrive."""
        if (transfer := self._transfer) is None:
            return False
        return not transfer.done() or (transfer.exception() is None and time.monotonic() < self._next_by)

    @property
    def load(self) -> EngineLoad:
        return self._engine.load

    @property
    def busy_s(self) -> float:
        return self._engine.busy_s

    @property
    def answered(self) -> Sequence[str]:
        return ()  # reported as deltas

    def take(self, request_id: str) -> None:
        return None

    def submit(self, request: GenerationRequest, *, streamed: bool = False) -> str:
        self._engine.submit(request)
        known = {sample: Amount(len(one.tokens), len(one.choices)) for sample, one in request.known.items()}
        self._reported[request.id] = [known.get(sample, NOTHING) for sample in range(request.num_samples)]
        return request.id

    def cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)
        self._reported.pop(request_id, None)

    def step(self) -> None:
        self._activity.beat()
        if self._engine.busy:
            self._have_follow(True)
            self._engine.step()
        if not self._engine.busy:
            self._have_follow(False)

    def take_deltas(self) -> list[tuple[str, Delta]]:
        deltas = []
        for request_id in [*self._engine.answered]:
            answers = self._engine.take(request_id) or ()
            reported = self._reported.pop(request_id, [NOTHING] * len(answers))
            for sample, (first, one) in enumerate(zip(reported, answers, strict=True)):
                new = _delta(sample, one, first)
                end = replace(new, finish_reason=one.finish_reason, stop=one.stop, prompt=one.prompt)
                deltas.append((request_id, end))
        if self._engine.busy and time.monotonic() - self._reported_at >= self._report_every_s:
            deltas += self._unfinished()
            self._reported_at = time.monotonic()
        return deltas

    def _unfinished(self) -> list[tuple[str, Delta]]:
        deltas = []
        for part in self._engine.partial_answers():
            reported, found = self._reported.get(part.request_id), part.prefix
            if reported is None or (first := reported[part.sample]).tokens >= len(found.tokens):
                continue
            reported[part.sample] = Amount(len(found.tokens), len(found.choices))
            deltas.append((part.request_id, _delta(part.sample, found, first)))
        return deltas

    # Commands for all ranks

    def receive(self, version: int, epoch: dict[str, Any] | None) -> Future[None]:
        return self._carry_out(Command("receive", (version, epoch)))

    def swap(self, version: int) -> None:
        self._carry_out(Command("swap", (version,)))
        self.version = version

    def wait(self) -> None:
        """Give the other ranks a sign of life, however long there is nothing to do."""
        self._activity.beat()
        if not self._followed:
            self._send(Command("wait"))

    def end(self) -> None:
        self._have_follow(False)
        self._send(Command("end"))

    def _carry_out(self, command: Command) -> Future[None]:
        self._have_follow(False)
        self._send(command)
        self._transfer = None
        begun = carry_out(command, self._weights)
        if self._holds and command.name != "swap":
            self._transfer, self._next_by = begun, time.monotonic() + NEXT_S
        self._activity.beat()
        return begun

    def _have_follow(self, follows: bool) -> None:
        if follows and not self._followed:
            self._send(Command("generate"))
        elif self._followed and not follows:
            self._engine.release_followers()
        self._followed = follows

    def _send(self, command: Command) -> None:
        if self._commands is not None:
            self._commands.send(command)


def _delta(sample: int, answer: AnswerPrefix | Completion, first: Amount) -> Delta:
    """Return the part of an answer that a reader who has `first` of it lacks."""
    start = first.tokens
    lists = answer.tokens[start:], answer.logprobs[start:], answer.versions[start:]
    return Delta(sample, *lists, choices=answer.choices[first.choices :])


class LedEngineThread:
    """Implements `ReplicaLeader` and `Scorer` over a leader, whose engine computes in a thread."""

    turns: TakesTurns | None = None

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._thread = EngineThread(leader, self._fail)

    @property
    def version(self) -> int | None:
        return self._leader.version

    @property
    def load(self) -> EngineLoad:
        return self._thread.load

    @property
    def busy_s(self) -> float:
        return self._leader.busy_s

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._thread.start()
        try:
            yield
            await asyncio.wait_for(self._thread.call(self._leader.end), STOP_S)
        finally:
            self._thread.stop("the replica leaves")
        await asyncio.to_thread(self._thread.join)

    async def watch(self) -> None:
        await first_of(self._failure, self._wait_together())

    async def _wait_together(self) -> None:
        while True:
            await self._thread.call(self._leader.wait)
            await asyncio.sleep(WAIT_EVERY_S)

    def _fail(self, error: Exception) -> None:
        self._failure.get_loop().call_soon_threadsafe(self._note, error)

    def _note(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def submit(self, request: GenerationRequest, news: asyncio.Event) -> OpenRequest:
        return self._thread.submit(request, True, news)

    async def receive(self, version: int, epoch: dict[str, Any] | None) -> asyncio.Future[None]:
        return asyncio.wrap_future(await self._thread.call(partial(self._leader.receive, version, epoch)))

    async def swap(self, version: int, probe: Probe | None) -> None:
        """Use a version. Weights that arrived complete are right here, so nothing is probed."""
        await self._thread.call(partial(self._leader.swap, version))

    async def score(self, tokens: list[int], top: int) -> list[TokenScore]:
        """Score a prompt, after which the engine also samples a token."""
        news = asyncio.Event()
        request = GenerationRequest(tokens, 1, Sampling(max_new_tokens=1), key=0, prompt_logprobs=top)
        asked = self.submit(request, news)
        try:
            while True:
                await news.wait()
                news.clear()
                for delta in asked.unread():
                    if (found := delta.prompt) is not None:
                        likeliest = found.top_logprobs if top else [{}] * len(found.logprobs)
                        return [
                            TokenScore(own, [*its], [*its.values()])
                            for own, its in zip(found.logprobs, likeliest, strict=True)
                        ]
        finally:
            asked.close()
