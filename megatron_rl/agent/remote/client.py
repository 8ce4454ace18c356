"""Asks an agent server for rollouts, and generates for it what it asks for meanwhile."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from megatron_rl.agent.api import EvaluationResponse
from megatron_rl.agent.remote.wire import (
    POLL_S,
    PROTOCOL,
    REFUSALS,
    About,
    AgentRequest,
    Garbled,
    decode_about,
    decode_refusal,
    decode_response,
    encode_agent_request,
    encode_completions,
    encode_refusal,
)
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.api import Completion, GenerationRequest
from megatron_rl.inference.replicas.wire import Garbled as GarbledRequest
from megatron_rl.inference.replicas.wire import decode_request, encode_request

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
CONNECT_S = 5.0
SILENCE_S = POLL_S + 25.0
"""Longest wait for one answer of the server."""
GOODBYE_S = 1.0
"""That it may take to be told that nobody waits any more; it finds out by itself too."""
MAX_STARTS = 20
"""How often one request is begun anew where the agent forgets it: no more, or one that it dies of would never end."""

Generate = Callable[[GenerationRequest], Awaitable[list[Completion]]]


class AgentUnavailable(RuntimeError):
    """An agent server does not answer as one should, and may do so later."""


class AgentRefused(AgentUnavailable):
    """It answers that it is not ours to ask."""


class AgentFailed(RuntimeError):
    """An agent failed of this one request."""


@dataclass(frozen=True, slots=True)
class ServedAgent:
    """What an agent serves, as far as the ranks know it."""

    about: About
    prompts: Mapping[str, list[str]]
    """By set."""
    demonstrations: list[tuple[str, str]]
    """Worked answers to prompts that are trained on."""


class AgentClient:
    """Of one agent server."""

    def __init__(
        self,
        url: str,
        token: str,
        patience_s: float,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """
        patience_s: that the server may be away during a run.
        transport, sleep: for tests.
        """
        self._url = url.rstrip("/")
        self._patience_s = patience_s
        self._sleep = sleep
        self._options: dict[str, Any] = {
            "base_url": self._url,
            "headers": {"Authorization": f"Bearer {token}"},
            "timeout": httpx.Timeout(SILENCE_S, connect=CONNECT_S),
            "trust_env": False,  # a proxy of the environment does not lead to the job's own nodes
            "verify": self._url.startswith("https:"),  # else nothing need be read for it, which takes a quarter second
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=256),
        }
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that the client belongs to

    def fetch(self, patience_s: float) -> ServedAgent:
        """What is served. Blocks.

        Raises ConfigurationError where it is not to be had, or is no agent of ours.
        """
        with httpx.Client(**self._options) as client:
            try:
                return self._fetch(partial(self._get, client, time.monotonic() + patience_s))
            except ConfigurationError:
                raise
            except (ValueError, KeyError, TypeError) as error:
                why = f"there is no {error} in what it says" if isinstance(error, KeyError) else str(error)
                raise ConfigurationError(f"what answers at {self._url} is no agent of mrl: {why}") from error

    def _fetch(self, get: Callable[..., Any]) -> ServedAgent:
        said = get("/about")
        if said["protocol"] != PROTOCOL:  # the rest may be another's
            raise ConfigurationError(
                f"the agent at {self._url}, of {said['environment']!r}, speaks protocol {said['protocol']}, and this "
                f"mrl {PROTOCOL}: run the same version on both sides"
            )
        about = decode_about(said)
        prompts = {
            name: _all(count, lambda first, name=name: get("/problems", set=name, first=first)["prompts"])  # type: ignore[misc]
            for name, count in about.sets.items()
        }
        taught = _all(about.demonstrations, lambda first: get("/demonstrations", first=first)["pairs"])
        return ServedAgent(about, prompts, [(str(prompt), str(answer)) for prompt, answer in taught])

    def _get(self, client: httpx.Client, give_up: float, path: str, **query: Any) -> Any:
        pause = FIRST_PAUSE_S
        while True:
            left_s = max(pause, give_up - time.monotonic())
            timeout = httpx.Timeout(min(SILENCE_S, left_s), connect=min(CONNECT_S, left_s))
            try:
                return self._content(client.get(path, params=query, timeout=timeout))
            except AgentRefused as error:
                raise ConfigurationError(str(error)) from error
            except (AgentUnavailable, httpx.RequestError) as error:
                if time.monotonic() >= give_up:
                    why = str(error) or type(error).__name__
                    raise ConfigurationError(
                        f"the agent at {self._url} is not there ({why}): start it with `mrl serve-agent`"
                    ) from error
            time.sleep(pause)
            pause = min(LONGEST_PAUSE_S, 2 * pause)

    async def run(
        self, route: str, asked: AgentRequest, digest: str, generate: Generate, vocab_size: int
    ) -> EvaluationResponse:
        """What the agent makes of a request. Where the server goes away it is asked again when it is back, and is told
        what has been generated already.

        Raises AgentUnavailable where it stays away, AgentFailed, and what `generate` raises.
        """
        generated = _Generated(generate)
        body = {"protocol": PROTOCOL, "digest": digest, "request": encode_agent_request(asked)}
        starts, pause, away_since = 0, FIRST_PAUSE_S, None
        while True:
            try:
                opened = await self._ask("POST", route, body)
                starts, pause, away_since = starts + 1, FIRST_PAUSE_S, None
                result = await self._converse(str(opened["session"]), generated, asked)
                return _checked(decode_response(result, vocab_size), asked)
            except (Garbled, KeyError, TypeError) as error:
                raise AgentFailed(f"it answers what it should not: {error}"[:200]) from error
            except AgentUnavailable as error:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > self._patience_s or starts >= MAX_STARTS:
                    raise
                logger.info("asking again: %s", error)
                await self._sleep(pause)
                pause = min(LONGEST_PAUSE_S, 2 * pause)

    async def _converse(self, session: str, generated: _Generated, asked: AgentRequest) -> Any:
        """From the beginning of a session to its result."""
        answering: dict[str, asyncio.Task[None]] = {}
        given_up: list[asyncio.Task[None]] = []
        news: asyncio.Task[Any] | None = None
        limit_s = asked.limits.timeout_s + 2 * SILENCE_S  # of what the agent does by itself
        busy = time.monotonic()  # when it last waited for us
        try:
            while True:
                news = news or asyncio.create_task(
                    self._ask("POST", f"/sessions/{session}/poll", {"known": [*answering]})
                )
                at_work = [task for task in answering.values() if not task.done()]
                if at_work:
                    busy = time.monotonic()
                elif time.monotonic() - busy > limit_s:
                    raise AgentFailed(f"no result within {limit_s:g} s, without a question in between")
                done, _ = await asyncio.wait([news, *at_work], return_when=asyncio.FIRST_COMPLETED)
                for task in done - {news}:
                    task.result()
                if news not in done:
                    continue
                said, news = news.result(), None
                if "error" in said:
                    if said["error"]["kind"] == "error":
                        raise AgentFailed(said["error"]["message"])
                    raise decode_refusal(said["error"])
                if "result" in said:
                    return said["result"]
                for id in said["withdrawn"]:
                    given_up.append(answering.pop(id))
                    given_up[-1].cancel()
                for each in said["asks"]:
                    request = decode_request(each)
                    if request.id not in answering:
                        answering[request.id] = asyncio.create_task(self._answer(session, request, generated))
        except GarbledRequest as error:
            raise Garbled(str(error)) from error
        finally:
            tasks = [*answering.values(), *given_up, *([news] if news else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(AgentUnavailable, TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await self._ask("DELETE", f"/sessions/{session}", None)

    async def _answer(self, session: str, request: GenerationRequest, generated: _Generated) -> None:
        try:
            said: Any = encode_completions(await generated.of(request))
        except REFUSALS as error:
            said = encode_refusal(error)
        await self._ask("POST", f"/sessions/{session}/answers", {"answers": {request.id: said}})

    async def _ask(self, method: str, path: str, body: Any) -> Any:
        """Its answer. Raises AgentUnavailable."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client, self._loop = httpx.AsyncClient(transport=self._transport, **self._options), loop
        try:
            return self._content(await self._client.request(method, path, json=body))
        except httpx.RequestError as error:  # what cannot be decoded is none of transport
            raise AgentUnavailable(f"{self._url}: {error!r}") from error

    async def close(self) -> None:
        """End the connections of this event loop."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
            self._client = None

    def _content(self, response: httpx.Response) -> Any:
        if response.status_code in (401, 403):
            raise AgentRefused(f"the agent at {self._url} refuses the token: give the file that it was started with")
        if not response.is_success:
            raise AgentUnavailable(f"{self._url}: HTTP {response.status_code}: {response.text[:200]}")
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise AgentUnavailable(f"{self._url}: this is no JSON: {response.text[:100]}") from error


def _all(count: int, page: Callable[[int], list[Any]]) -> list[Any]:
    """Raises Garbled where there are fewer."""
    found: list[Any] = []
    while len(found) < count:
        more = page(len(found))
        if not more:
            raise Garbled(f"there are {len(found)} where {count} were said to be")
        found += more
    return found


def _checked(response: EvaluationResponse, asked: AgentRequest) -> EvaluationResponse:
    """Raises Garbled where it has not the size that was asked for."""
    if len(response.trajectories) != len(asked.problems) or max(map(len, response.trajectories)) > asked.samples:
        raise Garbled("more or fewer answers than were asked for")
    return response


class _Generated:
    """What has been generated for one request, so that an agent that begins anew need not wait for it again."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._done: dict[str, list[Completion]] = {}

    async def of(self, request: GenerationRequest) -> list[Completion]:
        question = json.dumps({**encode_request(request), "id": None})
        if question not in self._done:
            self._done[question] = await self._generate(request)
        return self._done[question]
