"""Weights of a vLLM on the devices of training ranks, which it takes turns with (recipe/device_turns.py).

/start      down -> asleep     starts vLLM, which needs the devices, and leaves them
/sleep      awake -> asleep    unfinished answers stay in vLLM, which computes their keys and values again later
/receive    asleep             wakes the weights; workers load them as they arrive from the ranks
/swap       asleep -> awake    wakes the cache, and generation continues once the probe has passed
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from megatron_rl.generate.refit.epoch import TransferFailed
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.replicas.wire import State
from megatron_rl.generate.vllm.client import CONTROL_S
from megatron_rl.generate.vllm.process import VllmGone, VllmRefused
from megatron_rl.generate.vllm.resumption import Resumption
from megatron_rl.generate.vllm.running import RunningVllm
from megatron_rl.generate.vllm.streams import Streams


class VllmTurns:
    """Implements `VersionOrder` and `TakesTurns`."""

    def __init__(
        self, vllm: RunningVllm, streams: Streams, setting: dict[str, Any], *, sleeps: bool, sleeps_again: bool
    ) -> None:
        """
        setting: what vLLM's workers must know of the run, see weight_engine.setting_of.
        sleeps: whether vLLM gives up its memory; if not, it only pauses while the ranks train.
        sleeps_again: see VllmRelease.
        """
        self.turns = self
        self.state: State = "down"
        self._vllm, self._client, self._streams, self._setting = vllm, vllm.client, streams, setting
        self._resumption = Resumption(vllm.client, streams)
        self._sleeps, self._sleeps_again = sleeps, sleeps_again
        self._starting: asyncio.Future[None] | None = None
        self._loading: asyncio.Future[None] | None = None
        self._loaded: int | None = None  # version that was loaded since vLLM fell asleep
        self._weights_awake = False
        self._changes = asyncio.Lock()
        self._rested_s, self._rests_since = 0.0, time.monotonic()

    @property
    def rested_s(self) -> float:
        return self._rested_s + (0.0 if self.state == "awake" else time.monotonic() - self._rests_since)

    def start(self) -> None:
        if self._starting is None:
            self._starting = self._vllm.begin(self._start())

    async def sleep(self) -> None:
        """Raises RuntimeError, which ends the replica."""
        if self._starting is None:
            return
        try:
            await asyncio.shield(self._starting)
        except Exception as error:  # whatever it is, the replica ends with it
            raise RuntimeError(f"its vLLM has not started: {error}") from error
        async with self._changes:
            if self._loading is not None:
                await asyncio.wait([self._loading])  # it is limited, and says itself how it has ended
            if self.state == "awake" or self._weights_awake:
                await self._fall_asleep()

    async def receive(self, version: int, epoch: dict[str, Any] | None) -> asyncio.Future[None]:
        async with self._changes:
            if self.state != "asleep":
                raise TransferFailed(f"its vLLM is {self.state}, and only receives weights while it is asleep")
            if self._loading is not None:
                await asyncio.wait([self._loading])
            self._loaded = None
            if self._sleeps and not self._weights_awake:
                await self._ending("wake its weights", self._client.wake("weights"))
            self._weights_awake = True
            await self._client.begin_receive(version, epoch, self._setting)
            self._loading = self._vllm.begin(self._load(version))
            return self._loading

    async def use(self, version: int, probe: Probe | None) -> None:
        # The ranks put their weights away before the cache wakes, so a version whose probe fails cannot be loaded
        # again: the replica ends, and its next start gets the weights of the next publication.
        async with self._changes:
            if self._loaded != version:
                raise TransferFailed(f"its vLLM has not loaded version {version} since it fell asleep")
            self._loaded = None
            await self._resumption.resume(version, probe, self._wake)
            self._rested_s, self.state = self.rested_s, "awake"

    def close(self) -> None:
        """Nothing is due."""

    async def _start(self) -> None:
        """Start vLLM and put it to sleep. A failure ends the replica, and is raised."""
        activity, doing = self._vllm.activity, self._vllm.activity.doing
        activity.begin("starting vLLM")
        try:
            await self._vllm.start(self._goes_on)
        except Exception as error:  # whatever it is, the front's watch ends the replica with it
            self._vllm.fail(error)
            raise
        activity.begin(doing)
        self._streams.rest()
        await self._fall_asleep()

    def _goes_on(self) -> bool:
        self._vllm.activity.beat()
        return True

    async def _fall_asleep(self) -> None:
        """Put vLLM to sleep, from which nothing is expected from the first moment on."""
        all_awake = self.state != "asleep"
        if self.state == "awake":
            self._rests_since = time.monotonic()
            self.state = "asleep"
        self._streams.rest()
        self._loaded = None
        await self._ending("sleep", self._give_up_memory(all_awake) if self._sleeps else self._client.pause())
        self._weights_awake = False
        self.state = "asleep"

    async def _give_up_memory(self, all_awake: bool) -> None:
        """all_awake: whether the cache is there, besides the weights."""
        if not (all_awake or self._sleeps_again):
            raise VllmRefused("this release keeps its weights if its cache sleeps already")
        await self._client.sleep()

    async def _wake(self) -> None:
        if not self._sleeps:
            await self._client.resume()
        elif not await self._client.wake("kv_cache"):
            raise VllmRefused("vLLM still sleeps after its weights and its cache were woken")

    async def _load(self, version: int) -> None:
        """Load a version while it arrives. Raises RuntimeError: TransferFailed if nothing was loaded; after any other
        the weights may be half loaded, which ends the replica."""
        try:
            with self._vllm.occupied():
                async with asyncio.timeout(CONTROL_S):
                    await self._load_what_comes(version)
        except TimeoutError as error:
            late = VllmGone(f"vLLM has not loaded version {version} within {CONTROL_S:.0f} s")
            self._vllm.fail(late)
            raise late from error
        self._loaded = version

    async def _load_what_comes(self, version: int) -> None:
        try:
            await self._client.start_update()
            await self._client.update(version, load=False)
        except VllmRefused as error:
            raise TransferFailed(str(error)) from error
        await self._ending(f"load version {version}", self._load_and_finish(version))

    async def _load_and_finish(self, version: int) -> None:
        await self._client.update(version, load=True)
        await self._client.finish_update(version)

    async def _ending(self, what: str, work: Any) -> None:
        """Do what ends the replica if it fails. Raises RuntimeError.

        what: for people, what vLLM does.
        """
        with self._vllm.occupied():
            try:
                await work
            except (VllmRefused, VllmGone) as error:
                self._vllm.fail(error)
                raise RuntimeError(f"vLLM does not {what}: {error}") from error
