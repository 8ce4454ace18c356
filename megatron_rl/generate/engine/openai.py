"""Client of servers with OpenAI's API, `vllm serve` or `mrl serve`: log-probs of texts, by POST /v1/completions with
token ids as the prompt and `prompt_logprobs`; and what every client of such a server needs."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from megatron_rl.contract.bounded_json import bounded_json
from megatron_rl.generate.engine.interface import TokenScore
from megatron_rl.generate.serving.plain_replies import PLAIN, plain
from megatron_rl.recipe.errors import ConfigurationError

logger = logging.getLogger(__name__)

RETRIED = {408, 429, 500, 502, 503, 504}
"""HTTP statuses of a server that is busy or starting."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Seconds between two attempts; the pause doubles each time."""
CONNECT_S = 10.0
LONGEST_BYTES = 2**28
"""Bytes of a reply, at most. Those of a text of a million tokens have a sixth of that."""
LOG_EVERY_S = 30.0
"""Seconds between two log lines about an unreachable server."""


class EndpointError(RuntimeError):
    """A server refused a request, could not be reached, or gave an answer that cannot be used."""


class EndpointAway(EndpointError):
    """A server is busy, starting or unreachable; another one, or the same later, may answer."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server. Its token is only referred to."""

    url: str
    """Base URL with the version: http://node:8000/v1"""
    model: str
    token_file: Path | None = None
    token_variable: str | None = None
    timeout_s: float = 600.0
    """Seconds without a byte from the server. An answer arrives only when it is complete."""


class Server:
    def __init__(self, endpoint: Endpoint, transport: httpx.AsyncBaseTransport | None) -> None:
        self.endpoint = endpoint
        self.outstanding = 0
        self.away_until = 0.0  # monotonic
        self.pause = FIRST_PAUSE_S
        self._client = httpx.AsyncClient(
            base_url=endpoint.url,
            headers=PLAIN | authorization(endpoint.token_file, endpoint.token_variable),
            event_hooks=plain(LONGEST_BYTES),
            timeout=httpx.Timeout(endpoint.timeout_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,  # a proxy from the environment does not lead to the job's own nodes
            transport=transport,
        )

    def note_away(self, now: float) -> None:
        """Leave it alone for a while, which doubles each time. Many requests may notice that it is away."""
        if now >= self.away_until:
            self.away_until = now + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE_S)

    async def score(self, tokens: Sequence[int], top: int) -> list[TokenScore]:
        """Score each token after the first. Raises EndpointError and ConfigurationError."""
        response = await self.post("completions", scoring_body(tokens, self.endpoint.model, top))
        try:
            return scores(bounded_json(response.content), tokens, top)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise EndpointError(
                f"{self.endpoint.url}: the log-probs of a prompt are missing ({error!r}): {response.text[:200]}"
            ) from error

    async def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """Return the response to a request. Raises EndpointError and ConfigurationError."""
        try:
            response = await self._client.post(path, json=body)
        except httpx.RequestError as gone:  # also a body that is not packed as its head says
            raise EndpointAway(f"{self.endpoint.url}: {gone!r}") from gone
        if not response.is_success:
            raise self._error(response)
        return response

    async def close(self) -> None:
        await self._client.aclose()

    def _error(self, response: httpx.Response) -> Exception:
        endpoint, status, message = self.endpoint, response.status_code, _message(response)
        if status in (401, 403):
            named = endpoint.token_file or endpoint.token_variable or "no token is configured"
            return ConfigurationError(f"{endpoint.url} refuses the token ({named}): {message}")
        if status == 404 and endpoint.model in message:  # as mrl and vLLM answer
            return ConfigurationError(
                f"{endpoint.url}: {message}: use the name of its model, or start the server with the name "
                f"{endpoint.model}"
            )
        kind = EndpointAway if status in RETRIED else EndpointError
        return kind(f"{endpoint.url}: HTTP {status}: {message}")


Answer = TypeVar("Answer")


class ScoringServers:
    """Servers with one model, which score texts. A text goes to the server with the fewest outstanding tokens, and to
    another one if that is away."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        limit_s: float,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """
        limit_s: seconds that all servers may be away.
        transport, sleep: for tests.

        Raises ConfigurationError if the token of an endpoint cannot be read.
        """
        self._transport, self._limit_s, self._sleep = transport, limit_s, sleep
        self._servers: list[Server] = []
        self.use(endpoints)
        self._logged_at = -math.inf
        self.busy_s = 0.0
        """Sum of the seconds that its requests took: it grows with every answer."""

    def use(self, endpoints: Sequence[Endpoint]) -> None:
        """Send requests to these servers from now on; without any, requests wait. Those that were asked before still
        answer. Belongs to the loop of the requests."""
        known = {server.endpoint: server for server in self._servers}
        self._servers = [known.get(each) or Server(each, self._transport) for each in endpoints]

    async def score(self, tokens: Sequence[int], top: int = 0) -> list[TokenScore]:
        """Score each token after the first, given those before it, at temperature 1.

        top: likeliest tokens to return at each position.

        Raises EndpointError, and ConfigurationError if a server refuses its token or has another model.
        """
        return await self.ask(lambda server: server.score(tokens, top), len(tokens))

    async def ask(self, request: Callable[[Server], Awaitable[Answer]], size: int = 1) -> Answer:
        """Return the answer to a request. Raises EndpointError, and ConfigurationError as `score` does.

        size: what it adds to the outstanding tokens of a server; or 1 for every request.
        """
        began = time.monotonic()
        found = await self._asked(request, size)
        self.busy_s += time.monotonic() - began
        return found

    async def close(self) -> None:
        for server in self._servers:
            await server.close()

    async def _asked(self, request: Callable[[Server], Awaitable[Answer]], size: int) -> Answer:
        waited = 0.0  # for a server; an answer that is lost may have taken longer
        while True:
            now = time.monotonic()
            server = min(self._servers, key=lambda each: (max(now, each.away_until), each.outstanding), default=None)
            if (pause := FIRST_PAUSE_S if server is None else server.away_until - now) > 0:
                waited += pause
                await self._sleep(pause)
            if server not in self._servers:  # others have replaced it
                if waited > self._limit_s:
                    raise EndpointAway(f"no server was there for {waited:.0f} s")
                continue
            server.outstanding += size
            try:
                found = await request(server)
            except EndpointAway as away:
                server.note_away(time.monotonic())
                if waited > self._limit_s:
                    raise
                self._log(away)
            else:
                server.pause = FIRST_PAUSE_S
                return found
            finally:
                server.outstanding -= size

    def _log(self, away: EndpointAway) -> None:
        if (now := time.monotonic()) - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            logger.warning("requests are repeated until a server answers: %s", away)


# Bodies


def scoring_body(tokens: Sequence[int], model: str, top: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": [*tokens],
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": top,
        "return_token_ids": True,
    }


def scoring_answer(tokens: Sequence[int], scored: Sequence[TokenScore]) -> dict[str, Any]:
    given = []
    for token, score in zip(tokens[1:], scored, strict=True):
        likeliest = zip(score.tokens, score.logprobs, strict=True)
        given.append({str(its): {"logprob": logprob} for its, logprob in ((token, score.logprob), *likeliest)})
    return {"choices": [{"index": 0, "prompt_logprobs": [None, *given]}]}


def scores(answer: Any, tokens: Sequence[int], top: int) -> list[TokenScore]:
    """Parse the response to `scoring_body`. Raises as `token_scores` does."""
    (choice,) = answer["choices"]
    return token_scores(choice["prompt_logprobs"], tokens, top)


LARGEST = 1e30
"""Number that is still finite in 32 bits, with room for sums."""


def token_scores(given: Any, tokens: Sequence[int], top: int) -> list[TokenScore]:
    """Parse log-probs by position and token, as OpenAI's API and vLLM's own return them.

    given: [seq] mappings of tokens as text to {"logprob": number}. The first is not read.

    Raises LookupError, TypeError, AttributeError, ValueError or OverflowError.
    """
    return [_token_score(at, token, top) for at, token in zip(given[1:], tokens[1:], strict=True)]


def _token_score(at: Any, token: int, top: int) -> TokenScore:
    own = _finite(at[str(token)])
    if not top:
        return TokenScore(own, [], [])
    likeliest = sorted(((_finite(each), -int(its)) for its, each in at.items()), reverse=True)[:top]
    if len(likeliest) < top:
        raise ValueError(f"{len(likeliest)} of {top} likeliest tokens")
    return TokenScore(own, [-negative for _, negative in likeliest], [logprob for logprob, _ in likeliest])


def _finite(entry: Any) -> float:
    logprob = float(entry["logprob"])
    if not abs(logprob) < LARGEST:
        raise ValueError("a log-prob that is not finite in 32 bits")
    return logprob


def _message(response: httpx.Response) -> str:
    try:
        found = bounded_json(response.content)
    except ValueError:
        return response.text[:500]
    error = found.get("error", found) if isinstance(found, dict) else found
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


def authorization(token_file: Path | None, token_variable: str | None) -> dict[str, str]:
    """Return the header with the token in a file or an environment variable; empty if there is none. Raises
    ConfigurationError."""
    if token_file is not None:
        try:
            token = token_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"the token file {token_file} cannot be read: {error}") from error
    elif token_variable is not None:
        token = os.environ.get(token_variable, "")
    else:
        return {}
    if not token or not token.isascii() or not token.isprintable():
        where = token_file or f"${token_variable}"
        raise ConfigurationError(f"{where} holds no token: it must be one line of printable ASCII characters")
    return {"Authorization": f"Bearer {token}"}
