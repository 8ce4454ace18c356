"""Leader of a replica that generates with vLLM: requests become streams of tokens, new weights a swap that is checked.

A swap happens between two tokens. vLLM pauses, loads the weights, forgets all cached keys and values, and continues;
the tokens that it samples from then on stay here until a probe has shown that its weights are the trainer's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Collection, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from megatron_rl.inference.api import Completion, Delta, EngineLoad, GenerationRequest
from megatron_rl.inference.config import ends_of
from megatron_rl.inference.request_limits import RequestLimits, refuse_duplicate
from megatron_rl.inference.text import Decode
from megatron_rl.rank.activity import Activity
from megatron_rl.refit.epoch import TransferFailed
from megatron_rl.refit.probe import EngineProbes, Probe, ProbeFailed
from megatron_rl.vllm.answers import Answer, Answers, shared_streams
from megatron_rl.vllm.client import CONTROL_S, Piece, VllmClient, VllmStats
from megatron_rl.vllm.process import VllmClosed, VllmGone, VllmProcess, VllmRefused

logger = logging.getLogger("megatron_rl")

T = TypeVar("T")

REPORT_EVERY_S = 1.0
"""Seconds between two reports of unfinished answers."""
NEWS_S = 0.02
"""Longest wait for tokens before other work of the thread is done, in seconds."""
NEXT_S = 120.0
"""Seconds that generation stays paused for a step of a transfer, if it pauses for those."""
POLL_S = 2.0
"""Seconds between two readings of vLLM's figures."""
SILENT_S = 60.0
"""Seconds after which a vLLM that reports no figures counts as gone."""
QUEUED_S = 0.05
"""Seconds in which vLLM queues a request. A probe that comes later waits for one answer to end."""
LOADS = 2
"""Attempts to load a version until its probe passes."""


class VllmLeader:
    """Implements `ReplicaLeader`. All methods belong to the engine's thread; `failure` may be read anywhere.

    Streams and control requests run in an asyncio loop in a thread of their own; `_lock` guards what both use.
    """

    def __init__(
        self,
        process: VllmProcess,
        client: VllmClient,
        limits: RequestLimits,
        end_ids: Collection[int],
        decode: Decode,
        activity: Activity,
        setting: dict[str, Any],
        most_samples: int,
        *,
        holds: bool = False,
    ) -> None:
        """
        client: not used yet.
        end_ids, decode: the tokenizer's.
        setting: what vLLM's workers have to know of the run, see weight_engine.setting_of.
        most_samples: answers that one request to vLLM may ask for.
        holds: whether vLLM pauses while weights are on their way, see refit/overlapped.py.
        """
        self.version: int | None = None
        self.failure: Exception | None = None
        self.busy_s = 0.0
        self._process, self._client, self._limits = process, client, limits
        self._end_ids, self._activity, self._setting, self._holds = end_ids, activity, setting, holds
        self._most_samples = most_samples
        self._lock = threading.Lock()
        self._answers = Answers(end_ids, decode)
        self._streams: dict[int, asyncio.Task[None]] = {}  # by the answer's id(); for the loop
        self._label = -1  # version of the weights that sample now
        self._probes = EngineProbes()
        self._stats = VllmStats()  # of a few seconds ago
        self._checked = True  # whether those weights were checked
        self._news = threading.Event()
        self._came_at = time.monotonic()  # when tokens came last, or the first request
        self._beat_at = 0.0
        self._reported_at = time.monotonic()
        self._held_until: float | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()
        self._begin(self._poll())

    # The engine, as EngineThread drives it

    @property
    def busy(self) -> bool:
        with self._lock:
            return any(not answer.left for answer in self._answers)

    @property
    def load(self) -> EngineLoad:
        with self._lock:
            unfinished = sum(not answer.ended for answer in self._answers)
        stats = self._stats
        free = round(stats.pages * (1.0 - stats.cache_used))
        waiting = min(stats.waiting, unfinished)
        return EngineLoad(unfinished - waiting, waiting, free, stats.pages, stats.preemptions)

    @property
    def answered(self) -> Sequence[str]:
        return ()  # reported as deltas

    def take(self, request_id: str) -> list[Completion] | None:
        return None

    def submit(self, request: GenerationRequest, *, streamed: bool = False) -> str:
        self._limits.check(request)
        with self._lock:
            refuse_duplicate(request, self._answers)
            if not any(True for _ in self._answers):
                self._came_at = time.monotonic()
            begun = self._answers.begin(request)
        self._loop.call_soon_threadsafe(self._begin_streams, begun)
        return request.id

    def cancel(self, request_id: str) -> None:
        with self._lock:
            dropped = self._answers.drop(request_id)
        self._loop.call_soon_threadsafe(self._end_streams, dropped)

    def step(self) -> None:
        """Wait a moment for tokens. Raises VllmGone if vLLM has ended."""
        self._news.wait(NEWS_S)
        self._news.clear()
        self._check()

    def take_deltas(self) -> list[tuple[str, Delta]]:
        unfinished = time.monotonic() - self._reported_at >= REPORT_EVERY_S
        if unfinished:
            self._reported_at = time.monotonic()
        with self._lock:
            return self._answers.deltas(unfinished=unfinished)

    # Weights

    def join(self, epoch: dict[str, Any]) -> Future[None]:
        return self._begin(self._watched(self._step({"epoch": epoch, "setting": self._setting})))

    def receive(self, version: int) -> Future[None]:
        return self._begin(self._watched(self._step({"version": version})))

    def swap(self, version: int, probe: Probe | None) -> None:
        """Use a version once it has arrived. Raises RuntimeError: TransferFailed if it has not, in which case vLLM
        continues with its weights; any other error ends the replica."""
        self._held_until = None
        try:
            self._begin(self._swap(version, probe)).result(CONTROL_S)
        except TransferFailed:
            raise
        except Exception as error:  # whatever it is, the weights may be half loaded
            self._fail(error)
            raise RuntimeError(str(error)) from error
        self.version = version
        self._activity.beat()

    def wait(self) -> None:
        """Give a sign of life, unless vLLM owes tokens and has sent none since the last one."""
        self._check()
        if self._held_until is not None and time.monotonic() > self._held_until:
            self._held_until = None
            self._begin(self._watched(self._client.resume()))
        if not self.busy or self._came_at > self._beat_at:
            self._beat_at = time.monotonic()
            self._activity.beat()

    def end(self) -> None:
        """Nothing: the process is ended by its owner."""

    def close(self) -> None:
        """End all streams and the loop."""
        self._begin(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # In the loop

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        """Do some work. If vLLM does not answer, the replica ends: a server whose engine has died may wait for open
        requests forever, while it refuses new ones."""
        try:
            await work
        except VllmGone as error:
            self._fail(error)
            raise

    async def _poll(self) -> None:
        """Read vLLM's figures again and again, and notice its end, which no open request may show."""
        read_at = time.monotonic()
        while self.failure is None:
            try:
                self._process.check()
                self._stats = await self._client.stats()
                read_at = time.monotonic()
            except VllmGone as error:
                if isinstance(error, VllmClosed) or time.monotonic() - read_at > SILENT_S:
                    self._fail(error)
            await asyncio.sleep(POLL_S)

    def _fail(self, error: Exception) -> None:
        """Note the error that ends the replica, with vLLM's own reason."""
        if self.failure is None:
            gone = isinstance(error, VllmGone)
            self.failure = VllmGone(self._process.with_reason(str(error))) if gone else error
        self._news.set()

    async def _step(self, step: dict[str, Any]) -> None:
        if self._holds:
            await self._client.pause()
            self._held_until = time.monotonic() + NEXT_S
        await self._client.begin_step(step)

    async def _swap(self, version: int, probe: Probe | None) -> None:
        await self._client.pause()
        try:
            await self._client.start_update()
            await self._client.update(version, load=False)
        except VllmRefused as error:
            await self._client.resume()
            raise TransferFailed(str(error)) from error
        for left in reversed(range(LOADS)):
            await self._client.update(version, load=True)
            await self._client.finish_update(version)
            await self._client.forget_prefixes()
            with self._lock:
                self._label, self._checked = version, probe is None
            if probe is None:
                await self._client.resume()
                return
            try:
                self._probes.check(probe, await self._score(probe))
                break
            except ProbeFailed as error:
                if not left:
                    raise
                logger.warning("version %d is loaded again: %s", version, error)
            await self._client.pause()
            await self._restart()
            await self._client.start_update()
        with self._lock:
            self._checked = True
            for answer in self._answers:
                answer.check()
        self._news.set()

    async def _score(self, probe: Probe) -> list[float]:
        """Resume with the probe in front of all answers, which lost their places when their cache was dropped."""
        scored = asyncio.ensure_future(self._client.score(probe.tokens))
        try:
            await asyncio.sleep(QUEUED_S)
            await self._client.resume()
            return await scored
        finally:
            scored.cancel()

    async def _restart(self) -> None:
        """Drop the tokens that were not checked, and let vLLM continue from the others."""
        tasks = [*self._streams.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with self._lock:
            for answer in self._answers:
                answer.drop_unchecked()
            answers = [*self._answers]
        self._begin_streams(answers)

    def _begin_streams(self, answers: Sequence[Answer]) -> None:
        for together in shared_streams(answers, self._most_samples):
            task = asyncio.ensure_future(self._stream(together))
            for answer in together:
                self._streams[id(answer)] = task
            task.add_done_callback(partial(self._forget_stream, together))

    def _forget_stream(self, answers: Sequence[Answer], task: asyncio.Task[None]) -> None:
        for answer in answers:
            if self._streams.get(id(answer)) is task:
                del self._streams[id(answer)]

    def _end_streams(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if (task := self._streams.get(id(answer))) is not None:
                task.cancel()

    async def _stream(self, answers: Sequence[Answer]) -> None:
        """Take the tokens of answers that continue one prompt. An error ends the replica, since another one can
        continue them."""
        first = answers[0]
        sampling = first.transcript.request.sampling
        ends = ends_of(sampling, self._end_ids)
        pieces = self._client.generate(first.prompt, sampling, ends, len(answers), first.known)
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    self._take(answers[piece.sample], piece)
                    if all(answer.ended for answer in answers):
                        return
        except Exception as error:  # noqa: BLE001 - raised by `_check`
            self._fail(error)

    def _take(self, answer: Answer, piece: Piece) -> None:
        with self._lock:
            answer.take(piece, self._label, checked=self._checked)
            now = time.monotonic()
            self.busy_s += now - self._came_at
            self._came_at = now
        if answer.relabelled and piece.versions is not None:
            logger.warning("%d tokens left under another policy version than vLLM's", answer.relabelled)
        self._news.set()
