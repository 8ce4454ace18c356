"""Requests that an agent is working on. While it works, each asks the ranks for the model's answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from typing import Any
from uuid import uuid4

from megatron_rl.agent.remote.agent_wire import decode_completions, decode_refusal, encode_refusal, encode_result
from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.generate.engine.interface import Completion, GenerationRequest, InferenceInterface
from megatron_rl.generate.replicas.wire import REFUSED, encode_request

FORGOTTEN_S = 120.0
"""Seconds without a poll after which a session is dropped: the ranks, which poll every few seconds, have gone."""

Work = Callable[[InferenceInterface], Coroutine[Any, Any, TrajectoryGroup]]


class UnknownSession(Exception):
    """There is no such session, or not any more."""


class AgentSession:
    """One request, from its start until its result was delivered. Implements `InferenceInterface`."""

    def __init__(self, work: Work, clock: Callable[[], float] = time.monotonic) -> None:
        self.id = uuid4().hex
        self._clock = clock
        self._asked: dict[str, tuple[GenerationRequest, asyncio.Future[list[Completion]]]] = {}
        self._withdrawn: set[str] = set()  # requests whose caller has left
        self._refusals: list[Exception] = []  # errors of requests that the engine cannot answer
        self._changed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(work(self))
        self._task.add_done_callback(lambda _: self._changed.set())
        self._heard_at = clock()

    @property
    def forgotten(self) -> bool:
        return self._clock() - self._heard_at > FORGOTTEN_S

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        answer: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._asked[request.id] = request, answer
        self._changed.set()
        try:
            return await answer
        finally:
            del self._asked[request.id]
            if answer.cancelled():
                self._withdrawn.add(request.id)
                self._changed.set()

    async def poll(self, known: Collection[str], wait_s: float) -> dict[str, Any]:
        """Return requests to the model other than `known`, those of `known` that were withdrawn, the result, or the
        agent's error. Waits up to `wait_s` seconds for one of them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not (self._task.done() or self._asked.keys() - set(known) or self._withdrawn & set(known)):
                    self._changed.clear()
                    await self._changed.wait()
        self._heard_at = self._clock()
        if not self._task.done():
            withdrawn = self._withdrawn & set(known)
            self._withdrawn -= withdrawn
            asks = [encode_request(one) for id, (one, _) in self._asked.items() if id not in known]
            return {"asks": asks, "withdrawn": [*withdrawn]}
        error = None if self._task.cancelled() else self._task.exception()
        if error is None:
            return {"result": encode_result(self._task.result())}
        if isinstance(error, REFUSED) and any(error is refusal for refusal in self._refusals):
            return {"error": encode_refusal(error)}
        return {"error": {"kind": "error", "message": f"{type(error).__name__}: {error}"[:300]}}

    def answer(self, answers: Mapping[str, Any]) -> None:
        """Take answers of the model, or why it cannot answer. Requests that are answered or withdrawn are skipped.

        Raises Garbled.
        """
        self._heard_at = self._clock()
        for id, said in answers.items():
            _, waiting = self._asked.get(id, (None, None))
            if waiting is None or waiting.done():
                continue
            if isinstance(said, Mapping):
                self._refusals.append(decode_refusal(said))
                waiting.set_exception(self._refusals[-1])
            else:
                waiting.set_result(decode_completions(said))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Sessions:
    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}

    def begin(self, work: Work) -> AgentSession:
        session = AgentSession(work)
        self._sessions[session.id] = session
        return session

    def get(self, id: str) -> AgentSession:
        """Raises UnknownSession."""
        try:
            return self._sessions[id]
        except KeyError:
            raise UnknownSession(id) from None

    async def end(self, id: str) -> None:
        if session := self._sessions.pop(id, None):
            await session.close()

    async def end_forgotten(self, every_s: float = FORGOTTEN_S / 4) -> None:
        while True:
            await asyncio.sleep(every_s)
            for id in [id for id, session in self._sessions.items() if session.forgotten]:
                await self.end(id)

    async def close(self) -> None:
        for id in list(self._sessions):
            await self.end(id)
