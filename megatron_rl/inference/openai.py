"""A server with OpenAI's API that returns token ids, as an engine over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.api import Completion, Delta, GenerationRequest, PromptTooLong, Unsupported
from megatron_rl.inference.openai_bodies import (
    Endpoint,
    UnusableAnswer,
    body,
    completion,
    deltas,
    samples_of,
    scores,
    scoring_body,
)
from megatron_rl.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

RETRIED = {408, 429, 500, 502, 503, 504}
"""HTTP statuses of a server that is busy or starting."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Seconds between two attempts; the pause doubles each time."""
CONNECT_S = 10.0
"""Seconds to connect."""
LOG_EVERY_S = 30.0
"""Seconds between two log lines about an unreachable server."""


class EndpointError(RuntimeError):
    """A server refused a request, or could not be reached."""


class EndpointAway(EndpointError):
    """A server is busy, starting or unreachable; another one, or the same later, may answer."""


class OpenAIInference:
    """Implements `StreamingInference` by an endpoint. It is an asynchronous context, which closes its connections."""

    def __init__(
        self,
        endpoint: Endpoint,
        tokenizer: Tokenizer | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """transport, sleep: for tests.

        Raises ConfigurationError if the endpoint's token cannot be read.
        """
        self.policy_version = 0
        """Policy version of the server's weights, for tokens without one; see refit/external.py."""
        self._logged_at = -math.inf
        self._endpoint = endpoint
        self._tokenizer = tokenizer
        self._sleep = sleep
        self._headers = authorization(endpoint.token_file, endpoint.token_variable)
        self._transport = transport
        # Connections belong to the loop that opened them, and agents may run in several loops.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    @property
    def _base_url(self) -> str:
        return self._endpoint.url.rstrip("/") + "/"

    @property
    def _client(self) -> httpx.AsyncClient:
        """Client of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = httpx.AsyncClient(
                base_url=self._base_url,
                headers=self._headers,
                timeout=httpx.Timeout(self._endpoint.timeout_s, connect=CONNECT_S),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                trust_env=False,  # a proxy from the environment does not lead to the job's own nodes
                transport=self._transport,
            )
        return self._clients[loop]

    async def __aenter__(self) -> OpenAIInference:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Answer a request. Raises EndpointError if every attempt failed, and ConfigurationError if
        the server has another model."""
        # Weights may change during the request: then report the previous version, so that no token seems too new.
        version = self.policy_version
        response = await self._ask("completions", body(request, self._endpoint), stream=False)
        answer = self._parsed(response)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        except (KeyError, TypeError) as error:
            raise UnusableAnswer(
                f"{self._endpoint.url}: the response is no list of choices: {response.text[:200]}"
            ) from error
        asked = samples_of(request, self._endpoint)
        if [choice["index"] for choice in choices] != [*range(asked)]:
            raise UnusableAnswer(f"{self._endpoint.url}: {len(choices)} choices, but the request asked for {asked}")
        decode = self._tokenizer.decode if self._tokenizer else None
        parts = (part for choice in choices for part in deltas(choice, request, self._endpoint, version))
        return [completion(part, request, decode) for part in parts]

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-prob of each token after the first, given those before it, at temperature 1. Raises EndpointError, and
        UnusableAnswer if the server does not report them."""
        response = await self._ask("completions", scoring_body(tokens, self._endpoint), stream=False)
        return scores(self._parsed(response), tokens)

    def _parsed(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError as error:
            raise UnusableAnswer(f"{self._endpoint.url}: the response is no JSON: {response.text[:200]}") from error

    def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        return self._stream(request, {**body(request, self._endpoint), "stream": True})

    async def _stream(self, request: GenerationRequest, content: dict[str, Any]) -> AsyncIterator[Delta]:
        version, unfinished = self.policy_version, request.num_samples
        response = await self._ask("completions", content, stream=True)
        try:
            async for line in response.aiter_lines():
                field, _, data = line.partition(":")
                if field != "data" or data.strip() == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise EndpointError(f"{self._endpoint.url}: {_message(event)}")
                for choice in event["choices"]:
                    for part in deltas(choice, request, self._endpoint, version):
                        unfinished -= part.finish_reason is not None
                        yield part
        except ConfigurationError:
            raise
        except (httpx.TransportError, ValueError, KeyError, TypeError) as error:
            raise EndpointError(f"{self._endpoint.url}: a stream was interrupted: {error!r}") from error
        finally:
            await response.aclose()
        if unfinished:
            raise EndpointError(f"{self._endpoint.url}: a stream ended before {unfinished} of its answers")

    async def _ask(self, path: str, content: dict[str, Any], *, stream: bool) -> httpx.Response:
        """Post to a path and return a successful response, whose stream is not read yet. Retry while the server
        is busy or unreachable; the seed stays the same, and so does the answer.

        Raises PromptTooLong, Unsupported, ConfigurationError, or EndpointError: EndpointAway after the last attempt.
        """
        pause = FIRST_PAUSE_S
        for left in reversed(range(self._endpoint.attempts)):
            wait: float | None = None
            try:
                asked = self._client.build_request("POST", path, json=content)
                response = await self._client.send(asked, stream=stream)
                if response.is_success:
                    return response
                await response.aread()
            except httpx.TransportError as gone:
                error: Exception = EndpointAway(f"{self._endpoint.url}: {gone!r}")
            else:
                error, wait = self._error(response), _retry_after(response)
                if response.status_code not in RETRIED:
                    raise error
            if not left:
                raise error
            self._log_retry(error)
            await self._sleep(min(LONGEST_PAUSE_S, pause if wait is None else wait))
            pause *= 2
        raise AssertionError("there is at least one attempt")

    def _log_retry(self, error: Exception) -> None:
        """Log only now and then: hundreds of requests may be waiting."""
        if (now := time.monotonic()) - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            logger.warning("retrying until the server answers: %s", error)

    def _error(self, response: httpx.Response) -> Exception:
        try:
            found = response.json()
        except ValueError:
            found = response.text
        error = found.get("error") if isinstance(found, dict) else None
        message, code = _message(found), error.get("code") if isinstance(error, dict) else None
        if response.status_code in (401, 403):
            named = self._endpoint.token_file or self._endpoint.token_variable or "no token is configured"
            return ConfigurationError(f"{self._endpoint.url} refuses the token ({named}): {message}")
        if response.status_code == 404 and self._endpoint.model in message:  # as mrl and vLLM answer
            return ConfigurationError(
                f"{self._endpoint.url}: {message}: use the name of its model, or start the server with the name "
                f"{self._endpoint.model}"
            )
        if response.status_code == 400 and (code == "context_length_exceeded" or "context length" in message):
            return PromptTooLong(message)
        if response.status_code == 400 and code == "unsupported_parameter":
            return Unsupported(f"{message} ({self._endpoint.url})")
        kind = EndpointAway if response.status_code in RETRIED else EndpointError
        return kind(f"{self._endpoint.url}: HTTP {response.status_code}: {message}")


def root_of(url: str) -> str:
    """Address of a server, without the version of its API."""
    return url.rstrip("/").removesuffix("/v1")


def _message(found: Any) -> str:
    """Return the message of an error body, in OpenAI's format or another."""
    error = found.get("error", found) if isinstance(found, dict) else found
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:500]


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds that the server asks to wait."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else None


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
