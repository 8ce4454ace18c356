"""Leader of a replica that generates with vLLM: requests become streams of tokens, new weights a swap."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, TypeVar

from megatron_rl.inference.api import Completion, Delta, EngineLoad, GenerationRequest
from megatron_rl.inference.request_limits import RequestLimits
from megatron_rl.inference.text import Decode
from megatron_rl.rank.activity import Activity
from megatron_rl.refit.epoch import GLOO, Epoch, TransferFailed
from megatron_rl.refit.probe import Probe
from megatron_rl.vllm.client import CONTROL_S, VllmClient, VllmStats
from megatron_rl.vllm.process import VllmClosed, VllmGone, VllmProcess, VllmRefused
from megatron_rl.vllm.streams import Streams
from megatron_rl.vllm.swap import WeightSwap

logger = logging.getLogger("megatron_rl")

T = TypeVar("T")

REPORT_EVERY_S = 1.0
"""Seconds between two reports of unfinished answers."""
NEWS_S = 0.02
"""Longest wait for tokens before other work of the thread is done, in seconds."""
NEXT_S = 120.0
"""Seconds that generation stays paused for a step of a transfer, if it pauses for those."""
POLL_S = 2.0
"""Seconds between two looks at vLLM."""
SILENT_S = 60.0
"""Seconds after which a vLLM that reports no figures counts as gone."""


class VllmLeader:
    """Implements `ReplicaLeader`. All methods belong to the engine's thread; `failure` may be read anywhere.

    Streams and control requests run in an asyncio loop in a thread of their own.
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
        silence_limit_s: float,
        *,
        holds: bool = False,
        profiled: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """
        client: not used yet.
        end_ids, decode: the tokenizer's.
        setting: what vLLM's workers have to know of the run, see weight_engine.setting_of.
        most_samples: answers that one request to vLLM may ask for.
        silence_limit_s: seconds after which idle workers that do not react count as gone.
        holds: whether vLLM pauses while weights are on their way over NCCL, see refit/overlapped.py.
        profiled: policy version -> name of its profile.
        """
        self.version: int | None = None
        self.failure: Exception | None = None
        self._process, self._client, self._limits = process, client, limits
        self._activity, self._setting, self._holds = activity, setting, holds
        self._over_nccl = True  # whether the transfers of this epoch are
        self._silence_limit_s = silence_limit_s
        self._profiled = profiled
        self._streams = Streams(client, end_ids, decode, most_samples, self._fail)
        self._weights = WeightSwap(client, self._streams)
        self._swaps = False  # whether a swap is under way
        self._stats = VllmStats()  # of a few seconds ago
        self._beat_at = 0.0
        self._reported_at = time.monotonic()
        self._held_until: float | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()
        self._begin(self._watch())

    # The engine, as EngineThread drives it

    @property
    def busy(self) -> bool:
        return self._streams.busy

    @property
    def busy_s(self) -> float:
        return self._streams.busy_s

    @property
    def load(self) -> EngineLoad:
        unfinished, stats = self._streams.unfinished, self._stats
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
        self._loop.call_soon_threadsafe(self._streams.begin, self._streams.add(request))
        return request.id

    def cancel(self, request_id: str) -> None:
        self._loop.call_soon_threadsafe(self._streams.end, self._streams.drop(request_id))

    def step(self) -> None:
        """Wait a moment for tokens. Raises VllmGone if vLLM has ended."""
        self._streams.news.wait(NEWS_S)
        self._streams.news.clear()
        self._check()

    def take_deltas(self) -> list[tuple[str, Delta]]:
        unfinished = time.monotonic() - self._reported_at >= REPORT_EVERY_S
        if unfinished:
            self._reported_at = time.monotonic()
        return self._streams.deltas(unfinished=unfinished)

    # Weights

    def join(self, epoch: dict[str, Any]) -> Future[None]:
        self._over_nccl = Epoch.from_json(epoch).backend != GLOO
        return self._begin(self._watched(self._step({"epoch": epoch, "setting": self._setting})))

    def receive(self, version: int) -> Future[None]:
        return self._begin(self._watched(self._step({"version": version})))

    def swap(self, version: int, probe: Probe | None) -> None:
        """Use a version once it has arrived. Raises RuntimeError: TransferFailed if it has not, in which case vLLM
        continues with its weights; any other error ends the replica."""
        self._held_until = None
        self._swaps = True
        try:
            self._begin(self._weights.to(version, probe)).result(CONTROL_S)
        except TransferFailed:
            raise
        except Exception as error:  # whatever it is, the weights may be half loaded
            self._fail(error)
            raise RuntimeError(str(error)) from error
        finally:
            self._swaps = False
        before, self.version = self.version, version
        if version in self._profiled or before in self._profiled:
            self._begin(self._profile(before in self._profiled, self._profiled.get(version)))
        self._activity.beat()

    def wait(self) -> None:
        """Give a sign of life, unless vLLM owes tokens and has sent none since the last one."""
        self._check()
        if self._held_until is not None and time.monotonic() > self._held_until:
            self._held_until = None
            self._begin(self._watched(self._client.resume()))
        if not self.busy or self._streams.came_at > self._beat_at:
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

    async def _watch(self) -> None:
        """Read vLLM's figures again and again, and notice its end, which no open request may show. While it has nothing
        to do, its workers must react; while it computes, its tokens and the limit of a swap show whether it does."""
        answered_at = reacted_at = time.monotonic()
        while self.failure is None:
            try:
                self._process.check()
                self._stats = await self._client.stats()
                answered_at = time.monotonic()
                if not (self.busy or self._swaps):
                    await self._client.reach_workers()
                reacted_at = time.monotonic()
            except VllmGone as error:
                now = time.monotonic()
                silent = now - answered_at > SILENT_S or now - reacted_at > self._silence_limit_s
                if silent or isinstance(error, VllmClosed):
                    self._fail(error)
            await asyncio.sleep(POLL_S)

    def _fail(self, error: Exception) -> None:
        """Note the error that ends the replica, with vLLM's own reason."""
        if self.failure is None:
            gone = isinstance(error, VllmGone | VllmRefused)
            self.failure = VllmGone(self._process.explained(str(error))) if gone else error
        self._streams.news.set()

    async def _profile(self, ends: bool, name: str | None) -> None:
        """End the profile of the version before if it `ends`, and begin that of the present one if it has a name."""
        try:
            if ends:
                await self._client.stop_profile()
            if name is not None:
                await self._client.start_profile(name)
        except (VllmGone, VllmRefused) as error:
            logger.warning("a profile of vLLM (%s) is left out: %s", name or "the end of the last one", error)

    async def _step(self, step: dict[str, Any]) -> None:
        if self._holds and self._over_nccl:
            await self._client.pause()
            self._held_until = time.monotonic() + NEXT_S
        await self._client.begin_step(step)
