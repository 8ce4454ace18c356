"""Client of an agent server: requests rollouts, and generates the completions that the agent requests meanwhile."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx

from megatron_rl.agent.remote.agent_wire import (
    POLL_S,
    PROTOCOL,
    AgentAnswers,
    AgentDescription,
    AgentRequest,
    decode_refusal,
    decode_result,
    encode_completions,
    encode_refusal,
)
from megatron_rl.contract.bounded_json import bounded_json
from megatron_rl.generate.engine.interface import Completion, GenerationRequest
from megatron_rl.generate.replicas.wire import REFUSED, Garbled, decode_request, encode_request
from megatron_rl.generate.serving.plain_replies import PLAIN, plain, plain_blocking
from megatron_rl.recipe.errors import ConfigurationError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
CONNECT_S = 5.0
SILENCE_S = POLL_S + 25.0
LONGEST_BYTES = 2**30
"""Bytes of a reply, at most: a result holds all answers of a group, each token with its log-prob."""
GOODBYE_S = 1.0
"""Seconds to wait for the end of a session; the server also ends abandoned sessions by itself."""
MAX_STARTS = 20
"""Largest number of starts of one request by an agent that loses it. Without a limit, a request that crashes the agent
would restart for ever."""

Generate = Callable[[GenerationRequest], Awaitable[list[Completion]]]


class AgentUnavailable(RuntimeError):
    """The agent server is unreachable or misbehaves; it may recover."""


class AgentRefused(AgentUnavailable):
    """The agent server rejects the token."""


class AgentFailed(RuntimeError):
    """The agent failed on this one request."""


class AgentClient:
    def __init__(
        self,
        url: str,
        token: str,
        patience_s: float,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Connect lazily, once per event loop.

        patience_s: seconds that the server may be unavailable during a run.
        transport, sleep: replaced by tests.
        """
        self._url = url.rstrip("/")
        self._patience_s = patience_s
        self._sleep = sleep
        self._options: dict[str, Any] = {
            "base_url": self._url,
            "headers": PLAIN | {"Authorization": f"Bearer {token}"},
            "timeout": httpx.Timeout(SILENCE_S, connect=CONNECT_S),
            "trust_env": False,  # proxies do not serve the job's own nodes
            "verify": self._url.startswith("https:"),  # loading certificates takes a quarter of a second
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=256),
        }
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the client's event loop

    def fetch(self, patience_s: float) -> AgentDescription:
        """Fetch description, prompts and demonstrations. Blocks for up to `patience_s` seconds. Raises
        ConfigurationError if the server is unavailable or is not an agent of mrl."""
        with httpx.Client(event_hooks=plain_blocking(LONGEST_BYTES), **self._options) as client:
            body = self._get(client, "/about", time.monotonic() + patience_s)
        protocol = body.get("protocol") if isinstance(body, dict) else None
        if isinstance(protocol, int) and protocol != PROTOCOL:  # the other fields may differ too
            raise ConfigurationError(
                f"the agent at {self._url}, of {body.get('environment')!r}, speaks protocol {protocol}, and this mrl "
                f"{PROTOCOL}: run the same version on both sides"
            )
        try:
            return AgentDescription.model_validate(body)
        except ValueError as error:
            raise ConfigurationError(f"the server at {self._url} is not an agent of mrl: {error}") from error

    def _get(self, client: httpx.Client, path: str, give_up: float) -> Any:
        pause = FIRST_PAUSE_S
        while True:
            left_s = max(pause, give_up - time.monotonic())
            timeout = httpx.Timeout(min(SILENCE_S, left_s), connect=min(CONNECT_S, left_s))
            try:
                return self._content(client.get(path, timeout=timeout))
            except AgentRefused as error:
                raise ConfigurationError(str(error)) from error
            except (AgentUnavailable, httpx.RequestError) as error:
                if time.monotonic() >= give_up:
                    why = str(error) or type(error).__name__
                    raise ConfigurationError(
                        f"the agent at {self._url} is unavailable ({why}): start it with `mrl serve-agent`"
                    ) from error
            time.sleep(pause)
            pause = min(LONGEST_PAUSE_S, 2 * pause)

    async def run(self, request: AgentRequest, digest: str, generate: Generate, vocab_size: int) -> AgentAnswers:
        """Run a request and return its result. If the server restarts, the request is sent again, and finished
        completions are reused.

        Raises AgentUnavailable after `patience_s` seconds without the server, AgentFailed, and the errors of
        `generate`.
        """
        generated = _Generated(generate)
        body = {"protocol": PROTOCOL, "digest": digest, "request": request.model_dump()}
        starts, pause, away_since = 0, FIRST_PAUSE_S, None
        while True:
            try:
                opened = await self._send("POST", "/rollouts", body)
                starts, pause, away_since = starts + 1, FIRST_PAUSE_S, None
                result = decode_result(await self._serve(str(opened["session"]), generated, request), vocab_size)
                if len(result.trajectories) > request.samples:
                    raise Garbled("more answers than requested")
                return result
            except (Garbled, KeyError, TypeError) as error:
                raise AgentFailed(f"invalid response: {error}"[:200]) from error
            except AgentUnavailable as error:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > self._patience_s or starts >= MAX_STARTS:
                    raise
                logger.info("trying again: %s", error)
                await self._sleep(pause)
                pause = min(LONGEST_PAUSE_S, 2 * pause)

    async def _serve(self, session: str, generated: _Generated, request: AgentRequest) -> Any:
        answering: dict[str, asyncio.Task[None]] = {}
        withdrawn: list[asyncio.Task[None]] = []
        poll: asyncio.Task[Any] | None = None
        limit_s = request.limits.timeout_s + 2 * SILENCE_S  # for the agent's own work between two generations
        busy = time.monotonic()  # when the agent last waited for the model
        try:
            while True:
                # The agent cannot call the ranks, so the ranks ask it for work: one poll is always open, and carries
                # the ids that are already being answered, so that the agent sends each request once. A generation
                # request that the agent no longer wants comes back as withdrawn and is cancelled. The limit of time
                # counts only while the agent holds the turn: as long as an answer of the model is pending, it is
                # waiting for us.
                poll = poll or asyncio.create_task(
                    self._send("POST", f"/sessions/{session}/poll", {"known": [*answering]})
                )
                pending = [task for task in answering.values() if not task.done()]
                if pending:
                    busy = time.monotonic()
                elif time.monotonic() - busy > limit_s:
                    raise AgentFailed(f"neither a result nor a generation request within {limit_s:g} s")
                done, _ = await asyncio.wait([poll, *pending], return_when=asyncio.FIRST_COMPLETED)
                for task in done - {poll}:
                    task.result()
                if poll not in done:
                    continue
                reply, poll = poll.result(), None
                if "error" in reply:
                    if reply["error"]["kind"] == "error":
                        raise AgentFailed(reply["error"]["message"])
                    raise decode_refusal(reply["error"])
                if "result" in reply:
                    return reply["result"]
                for id in reply["withdrawn"]:
                    withdrawn.append(answering.pop(id))
                    withdrawn[-1].cancel()
                for each in reply["asks"]:
                    wanted = decode_request(each)
                    if wanted.id not in answering:
                        answering[wanted.id] = asyncio.create_task(self._answer(session, wanted, generated))
        finally:
            tasks = [*answering.values(), *withdrawn, *([poll] if poll else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(AgentUnavailable, TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await self._send("DELETE", f"/sessions/{session}", None)

    async def _answer(self, session: str, request: GenerationRequest, generated: _Generated) -> None:
        try:
            answer: Any = encode_completions(await generated.completions(request))
        except REFUSED as error:
            answer = encode_refusal(error)
        await self._send("POST", f"/sessions/{session}/answers", {"answers": {request.id: answer}})

    async def _send(self, method: str, path: str, body: Any) -> Any:
        """Return the server's response. Raises AgentUnavailable."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            hooks = plain(LONGEST_BYTES)
            self._client = httpx.AsyncClient(transport=self._transport, event_hooks=hooks, **self._options)
            self._loop = loop
        try:
            return self._content(await self._client.request(method, path, json=body))
        except httpx.RequestError as error:  # includes bodies that cannot be decoded
            raise AgentUnavailable(f"{self._url}: {error!r}") from error

    async def close(self) -> None:
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
            self._client = None

    def _content(self, response: httpx.Response) -> Any:
        if response.status_code in (401, 403):
            raise AgentRefused(f"the agent at {self._url} rejects the token: use the token file of the server")
        if not response.is_success:
            raise AgentUnavailable(f"{self._url}: HTTP {response.status_code}: {response.text[:200]}")
        try:
            return bounded_json(response.content)
        except ValueError as error:
            raise AgentUnavailable(f"{self._url}: this is not JSON: {response.text[:100]}") from error


class _Generated:
    """Completions generated for one request, which a restarted agent receives without generating them again."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._done: dict[str, list[Completion]] = {}

    async def completions(self, request: GenerationRequest) -> list[Completion]:
        question = json.dumps({**encode_request(request), "id": None})
        if question not in self._done:
            self._done[question] = await self._generate(request)
        return self._done[question]
