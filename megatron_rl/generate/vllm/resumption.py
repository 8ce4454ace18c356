"""Let vLLM sample again after its weights have changed: what it samples leaves once a probe has shown that they are the
trainer's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from megatron_rl.generate.refit.probe import EngineProbes, Probe
from megatron_rl.generate.vllm.client import VllmClient
from megatron_rl.generate.vllm.streams import Streams

QUEUED_S = 0.05
"""Seconds in which vLLM queues a request. A probe that comes later waits for one answer to end."""


class Resumption:
    def __init__(self, client: VllmClient, streams: Streams) -> None:
        self._client, self._streams = client, streams
        self._probes = EngineProbes()

    async def resume(self, version: int, probe: Probe | None, resume: Callable[[], Awaitable[None]]) -> None:
        """Let a paused vLLM sample with weights that it has just loaded. Raises ProbeFailed; it then samples, and its
        tokens stay here.

        resume: makes vLLM continue.
        """
        await self._client.forget_prefixes()
        self._streams.label(version, checked=probe is None)
        if probe is None:
            await resume()
            return
        self._probes.check(probe, await self._score(probe, resume))
        self._streams.check()

    async def _score(self, probe: Probe, resume: Callable[[], Awaitable[None]]) -> list[float]:
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
            await resume()
            return [each.logprob for each in await scored]
        finally:
            scored.cancel()
