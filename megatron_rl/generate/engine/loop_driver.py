"""Running an engine in the asyncio loop of its caller, and answering its callers there."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Protocol

from megatron_rl.generate.engine.interface import Completion, Delta, GenerationRequest, SteppedEngine
from megatron_rl.generate.engine.request_limits import refuse_duplicate


class LoopDriver(ABC):
    """Runs the steps of an engine in the asyncio loop of its caller. That loop may change: the loop of an earlier phase
    may have ended with unfinished work."""

    _task: asyncio.Task[None] | None = None

    @property
    @abstractmethod
    def busy(self) -> bool: ...

    @abstractmethod
    def step(self) -> None: ...

    @abstractmethod
    def deliver(self) -> None:
        """Give callers the answers that are finished."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Give all callers the error of a step."""

    def drive(self) -> None:
        """Begin to run steps until the engine has no more work, unless that has begun."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._work())

    async def _work(self) -> None:
        self.deliver()  # answers that the known tokens complete
        while self.busy:
            await asyncio.sleep(0)
            try:
                self.step()
            except Exception as error:  # noqa: BLE001 - nobody awaits this task: each caller raises the error
                self.fail(error)
                return
            self.deliver()


class CheckedEngine(SteppedEngine, Protocol):
    def check(self, request: GenerationRequest) -> None: ...


class LoopCallers(LoopDriver):
    """Callers of one engine, which is driven in their loop."""

    def __init__(self, engine: CheckedEngine) -> None:
        self._engine = engine
        self._answers: dict[str, asyncio.Future[list[Completion]]] = {}
        self._streams: dict[str, asyncio.Queue[Delta | Exception]] = {}

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        self._refuse_duplicate(request)
        self._engine.submit(request)
        answer = self._answers[request.id] = asyncio.get_running_loop().create_future()
        self.drive()
        try:
            return await answer
        finally:
            del self._answers[request.id]
            self._engine.cancel(request.id)

    def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Return the deltas of all samples, interleaved. Closing the iterator cancels the request, and so does
        cancelling the task that iterates. Raises as `generate` does, immediately."""
        self._refuse_duplicate(request)
        self._engine.check(request)
        return self._stream(request)

    async def _stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        self._refuse_duplicate(request)
        self._engine.submit(request, streamed=True)
        deltas = self._streams[request.id] = asyncio.Queue()
        self.drive()
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
            self._engine.cancel(request.id)

    def _refuse_duplicate(self, request: GenerationRequest) -> None:
        refuse_duplicate(request, self._answers)
        refuse_duplicate(request, self._streams)

    @property
    def busy(self) -> bool:
        return self._engine.busy

    def step(self) -> None:
        self._engine.step()

    def deliver(self) -> None:
        for request_id in [each for each in self._engine.answered if each in self._answers]:
            if not (answer := self._answers[request_id]).done():
                answer.set_result(self._engine.take(request_id) or [])
        for request_id, delta in self._engine.take_deltas():
            if request_id in self._streams:
                self._streams[request_id].put_nowait(delta)

    def fail(self, error: Exception) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        for stream in self._streams.values():
            stream.put_nowait(error)
