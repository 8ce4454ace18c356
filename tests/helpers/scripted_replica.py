"""Inference replicas without a model: a replica's HTTP interface in a thread of the test, over an engine whose tokens
are functions of the request's key."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import uvicorn

from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.paths import Attempt
from megatron_rl.contract.records import write
from megatron_rl.generate.engine.interface import (
    Completion,
    EngineLoad,
    GenerationRequest,
    PartialAnswer,
    PromptTooLong,
)
from megatron_rl.generate.engine.transcript import RowAnswer, Transcript
from megatron_rl.generate.replica.app import ReplicaService
from megatron_rl.generate.replica.leader import Leader, LedEngineThread
from megatron_rl.generate.replica.lifecycle import first_of
from megatron_rl.generate.replicas.wire import PROTOCOL, State
from megatron_rl.rank.activity import Activity

DIGEST = "0123456789abcdef"
TOKEN = "a-token-of-a-run-with-32-characters-or-more"
LONGEST = 100
"""Most tokens of a prompt and its answer together."""


def token_at(request: GenerationRequest, sample: int, place: int) -> int:
    return (request.key * 31 + sample * 7 + place * place) % 997


def answers(request: GenerationRequest, version: int = 0) -> list[Completion]:
    """Return the answers of every scripted replica."""
    length = request.sampling.max_new_tokens
    return [
        Completion(
            [token_at(request, sample, place) for place in range(length)],
            [-float(place) for place in range(length)],
            "length",
            [version] * length,
        )
        for sample in range(request.num_samples)
    ]


class ScriptedEngine:
    """Implements `LedEngine`: one token of each sample per step, up to `hold_at` of them while it is set."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.hold_at: int | None = None
        self.policy_version = 0
        self.requests: list[GenerationRequest] = []
        self.sampled = 0
        self.cancelled: list[str] = []
        self.fails: Exception | None = None
        self.asleep = False
        """Whether it samples nothing."""
        self.impossible_at: int | None = None
        """Place of a token in each answer whose log-prob is -inf."""
        self._open: dict[str, list[Transcript]] = {}
        self._answered: dict[str, list[Completion]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._open)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(len(self._open), 0, 1, 1)

    @property
    def answered(self) -> list[str]:
        return [*self._answered]

    def submit(self, request: GenerationRequest) -> str:
        if len(request.prompt_tokens) + request.sampling.max_new_tokens > LONGEST:
            raise PromptTooLong(f"more than {LONGEST} tokens")
        self.requests.append(request)
        self._open[request.id] = [
            Transcript.begin(request, sample, frozenset(), None) for sample in range(request.num_samples)
        ]
        return request.id

    def cancel(self, request_id: str) -> None:
        if self._open.pop(request_id, None) is not None:
            self.cancelled.append(request_id)

    def step(self) -> None:
        if self.fails:
            raise self.fails
        time.sleep(0.0005)
        if self.asleep:
            return
        for request_id, samples in list(self._open.items()):
            for each in samples:
                place = len(each.tokens)
                if each.finish_reason is None and (self.hold_at is None or place < self.hold_at):
                    token = token_at(each.request, each.sample, place)
                    logprob = -math.inf if place == self.impossible_at else -float(place)
                    each.extend(RowAnswer(0, [token], [logprob]), self.policy_version)
                    self.sampled += 1
            if all(each.finish_reason for each in samples):
                self._answered[request_id] = [each.completion() for each in self._open.pop(request_id)]

    def take(self, request_id: str) -> list[Completion] | None:
        return self._answered.pop(request_id, None)

    def partial_answers(self) -> list[PartialAnswer]:
        return [
            PartialAnswer(name, each.sample, each.prefix())
            for name, samples in self._open.items()
            for each in samples
            if each.tokens
        ]

    def follow(self, waits: Any) -> None:
        raise AssertionError("it is one rank")

    def release_followers(self) -> None:
        pass  # there are no followers


class ScriptedWeights:
    """Implements `Weights`, which arrive immediately."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.said: list[Any] = []
        self.fails = False
        self._engine = engine

    def receive(self, version: int, epoch: dict[str, Any] | None) -> Future[None]:
        self.said.append(("receive", version, epoch))
        return done(RuntimeError("a member is gone") if self.fails else None)

    def swap(self, version: int) -> None:
        self.said.append(("swap", version))
        self._engine.policy_version, self._engine.asleep = version, False


class ScriptedTurns:
    """Implements `TakesTurns`: the engine of a replica beside training ranks, which starts and sleeps at once."""

    rested_s = 0.0

    def __init__(self, leader: Leader, engine: ScriptedEngine) -> None:
        self._leader, self._engine = leader, engine
        self._started = False
        engine.asleep, leader.version = True, None

    @property
    def state(self) -> State:
        return ("asleep" if self._engine.asleep else "awake") if self._started else "down"

    def start(self) -> None:
        self._started = True

    async def sleep(self) -> None:
        self._engine.asleep, self._leader.version = True, None


def done(error: Exception | None = None) -> Future[None]:
    """Return a future that is already done, or failed."""
    future: Future[None] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future


class ScriptedReplica:
    """One start of one replica; leaving the context ends it."""

    def __init__(
        self,
        attempt: Attempt,
        number: int,
        start: int = 0,
        *,
        version: int | None = 0,
        digest: str = DIGEST,
        token: str = TOKEN,
        transport: str = "gloo",
        beside: bool = False,
    ) -> None:
        """beside: whether it shares a device with training ranks, which must start it."""
        self.engine = ScriptedEngine()
        self.weights = ScriptedWeights(self.engine)
        self.mute = False
        """Whether it answers no more requests."""
        replica = attempt.replica(number)
        replica.folder.mkdir(parents=True, exist_ok=True)
        self.leader = Leader(self.engine, self.weights, None, Activity(replica, published=False), report_every_s=0.0)
        self.leader.version = version
        address = ReplicaAddress(number, start, "127.0.0.1", 0, 1, digest, PROTOCOL, 0.0, transport)
        self._listener = socket.create_server(("127.0.0.1", 0))
        led = LedEngineThread(self.leader)
        if beside:
            led.turns = ScriptedTurns(self.leader, self.engine)
        self.service = ReplicaService(led, address, token)
        self._loop = asyncio.new_event_loop()
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._answer, interface="asgi3", lifespan="off", log_config=None, timeout_graceful_shutdown=0
            )
        )
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)
        self._published: tuple[Path, ReplicaAddress] = (
            replica.listener,
            address._replace(port=self._listener.getsockname()[1]),
        )

    def __enter__(self) -> Self:
        self._thread.start()
        write(*self._published)
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """Close all its connections."""
        self.hang_up()
        self._thread.join(30)

    def hang_up(self) -> None:
        """Begin to end, which takes the server a fifth of a second."""
        self._server.should_exit = self._server.force_exit = True

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        while self.mute:
            await asyncio.sleep(0.01)
        await self.service.app(scope, receive, send)

    async def _serve(self) -> None:
        self._server.capture_signals = _nothing  # type: ignore[method-assign]  # we are in a thread
        async with self.service.engine.running():
            lives = self.service.until_over(asyncio.Event(), 1e9), self.service.engine.watch()
            await first_of(self._server.serve(sockets=[self._listener]), *lives)


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()
