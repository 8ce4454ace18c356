"""Client of a server whose model scores answers, or of replicas of the run: bounded, patient, and never asked the same
twice."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx

from megatron_rl.agent.environments.judged.judged_arguments import ScoringModel
from megatron_rl.agent.scoring import NotJudged
from megatron_rl.contract.bounded_json import bounded_json
from megatron_rl.generate.engine.openai import FIRST_PAUSE_S, LONGEST_PAUSE_S, RETRIED, authorization
from megatron_rl.generate.serving.plain_replies import PLAIN, ReplyRefused, plain

Read = Callable[[Any], Any]
"""Takes what is needed out of a response. May raise an error of READING."""
READING = (ValueError, LookupError, TypeError, AttributeError, OverflowError)
LONGEST_BYTES = 10_000_000
"""Bytes of a response, at most; a verdict has thousands."""


class CachedScorer(ABC):
    """Keeps replies, and sends the same request once."""

    def __init__(self, config: ScoringModel) -> None:
        self._limits = config
        self._replies: OrderedDict[str, Any] = OrderedDict()
        self._asking: dict[str, asyncio.Task[Any]] = {}

    @abstractmethod
    async def _ask(self, path: str, body: Mapping[str, Any], read: Read) -> Any:
        """Return what `read` finds in the response to a request. Raises NotJudged."""

    async def ask(self, path: str, body: Mapping[str, Any], read: Read, *, repeatable: bool = True) -> Any:
        """Return what `read` finds in the response to a request.

        repeatable: whether the same request has the same response, so that it is sent once.

        Raises NotJudged.
        """
        if not repeatable or not self._limits.cached:
            return await self._ask(path, body, read)
        # Ten thousand whole prompts, with an answer or two in each, would be a gigabyte.
        key = blake2b(json.dumps([path, body]).encode(), digest_size=16).hexdigest()
        if key in self._replies:
            self._replies.move_to_end(key)
            return self._replies[key]
        # Whoever asks first may be cancelled by a limit of its rollout while others wait for the same reply.
        if key not in self._asking:
            asking = self._asking[key] = asyncio.ensure_future(self._ask(path, body, read))
            asking.add_done_callback(lambda task: self._keep(key, task))
        return await asyncio.shield(self._asking[key])

    async def close(self) -> None:
        for asking in [*self._asking.values()]:
            asking.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    def _keep(self, key: str, task: asyncio.Task[Any]) -> None:
        del self._asking[key]
        if not task.cancelled() and task.exception() is None:
            self._replies[key] = task.result()
            if len(self._replies) > self._limits.cached:
                self._replies.popitem(last=False)


class ScoringServer(CachedScorer):
    def __init__(
        self,
        config: ScoringModel,
        url: str,
        model: str,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """transport, sleep: replaced by tests. Raises ConfigurationError if the token cannot be read."""
        super().__init__(config)
        file = Path(config.token_file).expanduser() if config.token_file else None
        self.config, self._url, self._model = config, url, model
        self._headers = authorization(file, config.token_variable)
        self._transport, self._sleep = transport, sleep
        self._clients: dict[asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, asyncio.Semaphore]] = {}

    async def close(self) -> None:
        await super().close()
        client, _ = self._clients.pop(asyncio.get_running_loop(), (None, None))
        if client is not None:
            await client.aclose()

    async def _ask(self, path: str, body: Mapping[str, Any], read: Read) -> Any:
        client, room = self._client()
        pause = FIRST_PAUSE_S
        async with room:
            for left in reversed(range(self.config.attempts)):
                try:
                    async with asyncio.timeout(self.config.timeout_s):
                        replied = await client.post(path, json={"model": self._model, **body})
                    if replied.is_success:
                        return read(bounded_json(replied.content))
                    why = f"HTTP {replied.status_code}"
                    passing = replied.status_code in RETRIED
                except ReplyRefused as error:
                    why, passing = str(error), False
                except (httpx.TransportError, TimeoutError) as error:
                    why, passing = type(error).__name__, True
                except (httpx.RequestError, *READING):
                    why, passing = "not in the expected form", False
                if not (left and passing):
                    break
                await self._sleep(pause)
                pause = min(LONGEST_PAUSE_S, 2 * pause)
        raise NotJudged(f"the judge at {self._url} did not answer: {why}")

    def _client(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            client = httpx.AsyncClient(
                base_url=self._url.rstrip("/") + "/",
                headers=PLAIN | self._headers,
                event_hooks=plain(LONGEST_BYTES),
                timeout=httpx.Timeout(self.config.timeout_s, connect=10.0),
                limits=httpx.Limits(max_connections=self.config.at_once),  # otherwise 100
                trust_env=not is_inside(httpx.URL(self._url).host),
                transport=self._transport,
            )
            self._clients[loop] = client, asyncio.Semaphore(self.config.at_once)
        return self._clients[loop]


def is_inside(host: str) -> bool:
    """Whether a server is inside the cluster, which the proxies of the environment do not serve: its host is a bare
    node name without dots, or a private address. Others may be reachable through a proxy only."""
    try:
        return ip_address(host).is_private
    except ValueError:
        return "." not in host
