"""Weights of a vLLM that has its devices to itself: received beside the engine, which pauses only to load them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from megatron_rl.generate.refit.epoch import GLOO, Epoch, TransferFailed
from megatron_rl.generate.refit.probe import Probe, ProbeFailed
from megatron_rl.generate.vllm.process import VllmRefused
from megatron_rl.generate.vllm.resumption import Resumption
from megatron_rl.generate.vllm.running import RunningVllm
from megatron_rl.generate.vllm.streams import Streams

logger = logging.getLogger("megatron_rl")

LOADS = 2
"""Attempts to load a version until its probe passes."""
NEXT_S = 120.0
"""Seconds that generation stays paused for weights on their way, if it pauses for those."""


class StagedWeights:
    """Implements `VersionOrder`."""

    turns = None

    def __init__(self, vllm: RunningVllm, streams: Streams, setting: dict[str, Any], *, holds: bool = False) -> None:
        """
        setting: what vLLM's workers must know of the run, see weight_engine.setting_of.
        holds: whether vLLM pauses while weights are on their way over NCCL, see generate/refit/overlapped.py.
        """
        self._vllm, self._client, self._streams, self._setting = vllm, vllm.client, streams, setting
        self._resumption = Resumption(vllm.client, streams)
        self._holds = holds
        self._over_nccl = True  # whether the transfers of this epoch are
        self._paused: asyncio.TimerHandle | None = None  # resumes if the swap is not requested

    async def receive(self, version: int, epoch: dict[str, Any] | None) -> asyncio.Future[None]:
        if epoch is not None:
            self._over_nccl = Epoch.from_json(epoch).backend != GLOO
        return self._vllm.begin(self._receive(version, epoch))

    async def use(self, version: int, probe: Probe | None) -> None:
        """vLLM pauses between two tokens, loads the weights, forgets all cached keys and values, and continues; the
        tokens that it samples from then on stay here until a probe has shown that its weights are the trainer's."""
        self.close()
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
            try:
                await self._resumption.resume(version, probe, self._client.resume)
                return
            except ProbeFailed as error:
                if not left:
                    raise
                logger.warning("version %d is loaded again: %s", version, error)
            await self._client.pause()
            await self._streams.restart()
            await self._client.start_update()

    def close(self) -> None:
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None

    async def _receive(self, version: int, epoch: dict[str, Any] | None) -> None:
        if self._holds and self._over_nccl:
            await self._client.pause()
            self.close()
            self._paused = asyncio.get_running_loop().call_later(NEXT_S, self._resume)
        await self._client.begin_receive(version, epoch, self._setting)

    def _resume(self) -> None:
        self._vllm.begin(self._client.resume())
