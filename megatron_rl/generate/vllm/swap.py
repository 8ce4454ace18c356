"""Swap of vLLM's weights between two tokens, which is checked.

vLLM pauses, loads the weights, forgets all cached keys and values, and continues; the tokens that it samples from then
on stay here until a probe has shown that its weights are the trainer's.
"""

from __future__ import annotations

import asyncio
import logging

from megatron_rl.generate.refit.epoch import TransferFailed
from megatron_rl.generate.refit.probe import EngineProbes, Probe, ProbeFailed
from megatron_rl.generate.vllm.client import VllmClient
from megatron_rl.generate.vllm.process import VllmRefused
from megatron_rl.generate.vllm.streams import Streams

logger = logging.getLogger("megatron_rl")

QUEUED_S = 0.05
"""Seconds in which vLLM queues a request. A probe that comes later waits for one answer to end."""
LOADS = 2
"""Attempts to load a version until its probe passes."""


class WeightSwap:
    """Swaps the weights of one vLLM, version after version, in the loop of the client."""

    def __init__(self, client: VllmClient, streams: Streams) -> None:
        self._client, self._streams = client, streams
        self._probes = EngineProbes()

    async def to(self, version: int, probe: Probe | None) -> None:
        """Use a version. Raises TransferFailed if it has not arrived, and then vLLM continues with its weights;
        after any other error they may be half loaded."""
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
