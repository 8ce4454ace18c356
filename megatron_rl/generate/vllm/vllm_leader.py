"""Leader of a replica that generates with vLLM: requests become streams of tokens, new weights a swap."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from megatron_rl.generate.engine.interface import EngineLoad, GenerationRequest
from megatron_rl.generate.engine.request_limits import RequestLimits
from megatron_rl.generate.refit.epoch import GLOO, Epoch, TransferFailed
from megatron_rl.generate.refit.probe import EngineProbes, Probe, ProbeFailed
from megatron_rl.generate.vllm.client import CONTROL_S
from megatron_rl.generate.vllm.process import VllmGone, VllmRefused
from megatron_rl.generate.vllm.running import RunningVllm
from megatron_rl.generate.vllm.streams import AskedVllm, Streams
from megatron_rl.model.tokenizer import Tokenizer

logger = logging.getLogger("megatron_rl")

QUEUED_S = 0.05
"""Seconds in which vLLM queues a request. A probe that comes later waits for one answer to end."""
LOADS = 2
"""Attempts to load a version until its probe passes."""
NEXT_S = 120.0
"""Seconds that generation stays paused for weights on their way, if it pauses for those."""


class VllmLeader:
    """Implements `ReplicaLeader`."""

    def __init__(
        self,
        vllm: RunningVllm,
        limits: RequestLimits,
        tokenizer: Tokenizer,
        setting: dict[str, Any],
        most_samples: int,
        *,
        holds: bool = False,
        profiled: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """
        setting: what vLLM's workers must know of the run, see weight_engine.setting_of.
        most_samples: answers that one request to vLLM may ask for.
        holds: whether vLLM pauses while weights are on their way over NCCL, see generate/refit/overlapped.py.
        profiled: policy version -> name of its profile.
        """
        self.version: int | None = None
        self._vllm, self._client, self._limits = vllm, vllm.client, limits
        self._setting, self._holds, self._profiled = setting, holds, profiled
        self._over_nccl = True  # whether the transfers of this epoch are
        self._streams = Streams(vllm, tokenizer, most_samples)
        self._probes = EngineProbes()
        self._swaps = False  # whether a swap is unfinished
        self._paused: asyncio.TimerHandle | None = None  # resumes if the swap is not requested
        self._tasks: set[asyncio.Future[None]] = set()

    @property
    def load(self) -> EngineLoad:
        unfinished, stats = self._streams.unfinished, self._vllm.stats
        free = round(stats.pages * (1.0 - stats.cache_used))
        waiting = min(stats.waiting, unfinished)
        return EngineLoad(unfinished - waiting, waiting, free, stats.pages, stats.preemptions)

    @property
    def busy_s(self) -> float:
        return self._streams.busy_s

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._vllm.running():
            try:
                yield
            finally:
                self._forget_pause()
                await self._streams.end()

    async def watch(self) -> None:
        await self._vllm.watch(lambda: self._streams.busy or self._swaps)

    def submit(self, request: GenerationRequest, news: asyncio.Event) -> AskedVllm:
        self._limits.check(request)
        return self._streams.add(request, news)

    async def receive(self, version: int, epoch: dict[str, Any] | None) -> asyncio.Future[None]:
        if epoch is not None:
            self._over_nccl = Epoch.from_json(epoch).backend != GLOO
        return self._begin(self._receive(version, epoch))

    async def swap(self, version: int, probe: Probe | None) -> None:
        """Use a version once it has arrived. Raises RuntimeError: TransferFailed if it has not, and then vLLM
        continues with its weights; any other error ends the replica.

        vLLM pauses between two tokens, loads the weights, forgets all cached keys and values, and continues; the tokens
        that it samples from then on stay here until a probe has shown that its weights are the trainer's.
        """
        self._forget_pause()
        self._swaps = True
        try:
            async with asyncio.timeout(CONTROL_S):
                await self._load(version, probe)
        except TransferFailed:
            raise
        except Exception as error:  # whatever it is, the weights may be half loaded
            self._vllm.fail(error)
            raise RuntimeError(str(error) or f"vLLM has not used version {version} within {CONTROL_S:.0f} s") from error
        finally:
            self._swaps = False
        before, self.version = self.version, version
        if version in self._profiled or before in self._profiled:
            self._begin(self._profile(before in self._profiled, self._profiled.get(version)))
        self._vllm.activity.beat()

    async def _load(self, version: int, probe: Probe | None) -> None:
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
            self._streams.label(version, checked=probe is None)
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
            await self._streams.restart()
            await self._client.start_update()
        self._streams.check()

    async def _score(self, probe: Probe) -> list[float]:
        """Resume with the probe in front of all answers, which lost their places when their cache was dropped."""
        # vLLM admits nothing while it is paused, but it queues requests by priority. A probe that is in the queue when
        # generation resumes is therefore computed in the first step; one that comes after finds the rows taken again by
        # the answers, and waits until one of them ends, while all their tokens are held back:
        #
        #     queue, pause ends, score     one step
        #     pause ends, queue, score     up to the length of an answer
        scored = asyncio.ensure_future(self._client.score(probe.tokens))
        try:
            await asyncio.sleep(QUEUED_S)
            await self._client.resume()
            return await scored
        finally:
            scored.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        """Do some work of vLLM. If it does not answer, the replica ends: a server whose engine has died refuses new
        requests."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), VllmGone):
            self._vllm.fail(error)

    async def _profile(self, ends: bool, name: str | None) -> None:
        """End the profile of the previous version if it `ends`, and begin that of the present one if it has a name."""
        try:
            if ends:
                await self._client.stop_profile()
            if name is not None:
                await self._client.start_profile(name)
        except (VllmGone, VllmRefused) as error:
            logger.warning("a profile of vLLM (%s) is left out: %s", name or "the end of the last one", error)

    async def _receive(self, version: int, epoch: dict[str, Any] | None) -> None:
        if self._holds and self._over_nccl:
            await self._client.pause()
            self._forget_pause()
            self._paused = asyncio.get_running_loop().call_later(NEXT_S, self._resume)
        await self._client.begin_receive(version, epoch, self._setting)

    def _resume(self) -> None:
        self._begin(self._client.resume())

    def _forget_pause(self) -> None:
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None
