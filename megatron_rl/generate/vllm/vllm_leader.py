"""Leader of a replica that generates with vLLM: requests become streams of tokens, new weights a swap."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, Protocol

from megatron_rl.generate.engine.interface import EngineLoad, GenerationRequest
from megatron_rl.generate.engine.request_limits import RequestLimits
from megatron_rl.generate.refit.epoch import TransferFailed
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.replica.replica_leader import TakesTurns
from megatron_rl.generate.vllm.client import CONTROL_S
from megatron_rl.generate.vllm.process import VllmGone, VllmRefused
from megatron_rl.generate.vllm.running import RunningVllm
from megatron_rl.generate.vllm.streams import AskedVllm, Streams

logger = logging.getLogger("megatron_rl")


class VersionOrder(Protocol):
    """The order in which vLLM gets the weights of a version, and samples with them."""

    @property
    def turns(self) -> TakesTurns | None: ...

    async def receive(self, version: int, epoch: dict[str, Any] | None) -> asyncio.Future[None]:
        """Same as ReplicaLeader.receive."""
        ...

    async def use(self, version: int, probe: Probe | None) -> None:
        """Use a version once it has arrived. Raises TransferFailed if it has not, and then vLLM continues with its
        weights, if it has any; any other error ends the replica."""
        ...

    def close(self) -> None: ...


class VllmLeader:
    """Implements `ReplicaLeader`."""

    def __init__(
        self,
        vllm: RunningVllm,
        limits: RequestLimits,
        streams: Streams,
        order: VersionOrder,
        profiled: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """profiled: policy version -> name of its profile."""
        self._vllm, self._limits, self._streams, self._order = vllm, limits, streams, order
        self._profiled = profiled
        self._used: int | None = None  # last version that vLLM has used

    @property
    def turns(self) -> TakesTurns | None:
        return self._order.turns

    @property
    def version(self) -> int | None:
        return self._used if self.turns is None or self.turns.state == "awake" else None

    @property
    def load(self) -> EngineLoad:
        unfinished, stats = self._streams.unfinished, self._vllm.stats
        free = round(stats.pages * (1.0 - stats.cache_used))
        waiting = min(stats.waiting, unfinished)
        return EngineLoad(
            unfinished - waiting, waiting, free, stats.pages, stats.preemptions, stats.drafted, stats.accepted
        )

    @property
    def busy_s(self) -> float:
        return self._streams.busy_s

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._vllm.running():
            try:
                yield
            finally:
                self._order.close()
                await self._streams.end()

    async def watch(self) -> None:
        await self._vllm.watch(lambda: self._streams.busy)

    def submit(self, request: GenerationRequest, news: asyncio.Event) -> AskedVllm:
        self._limits.check(request)
        return self._streams.add(request, news)

    async def receive(self, version: int, epoch: dict[str, Any] | None) -> asyncio.Future[None]:
        return await self._order.receive(version, epoch)

    async def swap(self, version: int, probe: Probe | None) -> None:
        """Use a version once it has arrived. Raises RuntimeError: TransferFailed if it has not; any other error ends
        the replica."""
        try:
            with self._vllm.occupied():
                async with asyncio.timeout(CONTROL_S):
                    await self._order.use(version, probe)
        except TransferFailed:
            raise
        except Exception as error:  # whatever it is, the weights may be half loaded
            self._vllm.fail(error)
            raise RuntimeError(str(error) or f"vLLM has not used version {version} within {CONTROL_S:.0f} s") from error
        before, self._used = self._used, version
        if version in self._profiled or before in self._profiled:
            self._vllm.begin(self._profile(before in self._profiled, self._profiled.get(version)))
        self._vllm.activity.beat()

    async def _profile(self, ends: bool, name: str | None) -> None:
        """End the profile of the previous version if it `ends`, and begin that of the present one if it has a name."""
        try:
            if ends:
                await self._vllm.client.stop_profile()
            if name is not None:
                await self._vllm.client.start_profile(name)
        except (VllmGone, VllmRefused) as error:
            logger.warning("a profile of vLLM (%s) is left out: %s", name or "the end of the last one", error)
