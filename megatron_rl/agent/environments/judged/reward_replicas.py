"""Client of the replicas that hold the run's reward model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NoReturn

import httpx

from megatron_rl.agent.environments.judged.judged_arguments import ScoringModel
from megatron_rl.agent.environments.judged.scoring_server import CachedScorer, Read
from megatron_rl.agent.scoring import NoScorer, NotJudged
from megatron_rl.generate.engine.openai import EndpointError, ScoringServers
from megatron_rl.generate.replicas.fixed_replicas import FixedModelLost, Running
from megatron_rl.recipe.errors import ConfigurationError

LOOK_S = 1.0
"""Seconds between two looks for replicas that have started."""


class ScoringReplicas(CachedScorer):
    """Replicas that come and go. Until `use` there are none, as outside of a run."""

    def __init__(self, config: ScoringModel) -> None:
        super().__init__(config)
        self._running: Running | None = None
        self._limit_s = 0.0
        self._asked: dict[asyncio.AbstractEventLoop, _Asked] = {}

    def use(self, running: Running, limit_s: float) -> None:
        """Ask these replicas from now on. limit_s: seconds that all may be away."""
        self._running, self._limit_s = running, limit_s

    async def close(self) -> None:
        await super().close()
        if asked := self._asked.pop(asyncio.get_running_loop(), None):
            await asked.close()

    async def _ask(self, path: str, body: Mapping[str, Any], read: Read) -> Any:
        if self._running is None:
            raise NotJudged("the replicas of reward.replicas are there only while their run trains")
        loop = asyncio.get_running_loop()
        if loop not in self._asked:
            self._asked[loop] = _Asked(self._running, self._limit_s, self._limits.at_once)
        try:
            return read((await self._asked[loop].post(path, body)).json())
        except FixedModelLost as error:
            raise NoScorer(str(error)) from error
        except (EndpointError, ConfigurationError) as error:
            raise NotJudged(f"the reward model did not answer: {error}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise NotJudged("the reward model did not answer: not in the expected form") from error


class _Asked:
    """The replicas as the tasks of one loop ask them, while another task looks which of them run."""

    def __init__(self, running: Running, limit_s: float, at_once: int) -> None:
        self._servers = ScoringServers((), limit_s)
        self._room = asyncio.Semaphore(at_once)
        self._looks = asyncio.ensure_future(self._look(running))

    async def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """Return the response of a replica. Raises FixedModelLost, EndpointError and ConfigurationError."""
        async with self._room:
            asks = self._servers.ask(lambda server: server.post(path, {"model": server.endpoint.model, **body}))
            asking = asyncio.ensure_future(asks)
            try:
                await asyncio.wait([self._looks, asking], return_when=asyncio.FIRST_COMPLETED)
                return asking.result() if asking.done() else self._looks.result()
            finally:
                asking.cancel()

    async def close(self) -> None:
        self._looks.cancel()
        await asyncio.gather(self._looks, return_exceptions=True)
        await self._servers.close()

    async def _look(self, running: Running) -> NoReturn:
        while True:
            self._servers.use(await asyncio.to_thread(running))
            await asyncio.sleep(LOOK_S)
