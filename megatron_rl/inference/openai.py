"""Any OpenAI-compatible server as an engine, over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
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
    delta,
    finish_reason,
)
from megatron_rl.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PASSING = {408, 429, 500, 502, 503, 504}
"""Statuses of a server that is busy or just coming up."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
CONNECT_S = 10.0
TELL_EVERY_S = 30.0
"""Between two lines of the log about a server that is away."""


class EndpointError(RuntimeError):
    """A server refused a request, or none could be reached."""


class OpenAIInference:
    """Implements `StreamingInference` by an endpoint; an asynchronous context, which closes its connections.

    Answers of a plain OpenAI endpoint come as text: their tokens are those that the tokenizer makes of it, and their
    log-probs are not known. That serves an evaluation, and is refused where tokens must be those that were sampled.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        tokenizer: Tokenizer | None = None,
        *,
        sampled_tokens: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """
        sampled_tokens: whether the very tokens that were sampled are needed, as for training.
        transport, sleep: for tests.

        Raises Unsupported where the endpoint does not tell them, ConfigurationError where its token cannot be read.
        """
        if endpoint.kind == "openai" and (sampled_tokens or tokenizer is None):
            raise Unsupported(
                "token ids: a plain OpenAI endpoint answers with text. Training needs the tokens that were sampled and "
                "their log-probs: use the server of mrl or vLLM"
            )
        self.policy_version = 0
        """Of the server's weights, where it does not say so of each token; see refit/external.py."""
        self._told_at = -math.inf
        self._endpoint = endpoint
        self._tokenizer = tokenizer
        self._sleep = sleep
        self._headers = authorization(endpoint)
        self._transport = transport
        # Connections belong to the loop in which they were made, and agents may run in several.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    @property
    def _client(self) -> httpx.AsyncClient:
        """Of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = httpx.AsyncClient(
                base_url=self._endpoint.url.rstrip("/") + "/",
                headers=self._headers,
                timeout=httpx.Timeout(self._endpoint.timeout_s, connect=CONNECT_S),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                trust_env=False,  # a proxy of the environment does not lead to the job's own nodes
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
        """See `InferenceInterface.generate`. Raises EndpointError where no attempt was answered, and ConfigurationError
        where another model has answered."""
        # What is sampled while the weights change is said to be of the ones before: older than it may be.
        version = self.policy_version
        response = await self._ask(body(request, self._endpoint), stream=False)
        try:
            answer = response.json()
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        except (ValueError, KeyError, TypeError) as error:
            raise UnusableAnswer(f"{self._endpoint.url}: this is no list of choices: {response.text[:200]}") from error
        self._check_model(answer)
        if [choice["index"] for choice in choices] != [*range(request.num_samples)]:
            raise UnusableAnswer(
                f"{self._endpoint.url}: {len(choices)} choices, where {request.num_samples} were asked for"
            )
        if self._endpoint.kind == "openai":
            return [self._from_text(choice, version) for choice in choices]
        decode = self._tokenizer.decode if self._tokenizer else None
        return [completion(delta(choice, request, version), request, decode) for choice in choices]

    def _from_text(self, choice: dict[str, Any], version: int) -> Completion:
        assert self._tokenizer is not None
        reason, text = finish_reason(choice), choice.get("text")
        if reason is None or not isinstance(text, str):
            raise UnusableAnswer("a choice has no text, or is not whole")
        tokens = self._tokenizer.encode(text) + [self._tokenizer.eos_id] * (reason == "stop")
        return Completion(tokens, [], reason, [version] * len(tokens))

    def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """See `StreamingInference.stream`. Raises Unsupported of an endpoint that does not tell token ids."""
        if self._endpoint.kind == "openai":
            raise Unsupported("stream: a plain OpenAI endpoint does not say which tokens a part of a text is made of")
        return self._stream(request, {**body(request, self._endpoint), "stream": True})

    async def _stream(self, request: GenerationRequest, content: dict[str, Any]) -> AsyncIterator[Delta]:
        version, unfinished = self.policy_version, request.num_samples
        response = await self._ask(content, stream=True)
        try:
            async for line in response.aiter_lines():
                field, _, data = line.partition(":")
                if field != "data" or data.strip() == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise EndpointError(f"{self._endpoint.url}: {_message(event)}")
                self._check_model(event)
                for choice in event["choices"]:
                    part = delta(choice, request, version)
                    unfinished -= part.finish_reason is not None
                    yield part
        except ConfigurationError:
            raise
        except (httpx.TransportError, ValueError, KeyError, TypeError) as error:
            raise EndpointError(f"{self._endpoint.url}: a stream broke off: {error!r}") from error
        finally:
            await response.aclose()
        if unfinished:
            raise EndpointError(f"{self._endpoint.url}: a stream ended before {unfinished} of its answers did")

    def _check_model(self, answer: dict[str, Any]) -> None:
        """Raise ConfigurationError where `mrl serve`, which answers to any name, serves another model."""
        asked, served = self._endpoint.model, answer.get("model")
        if self._endpoint.kind == "mrl" and served not in (None, asked):
            raise ConfigurationError(
                f"{self._endpoint.url} serves the model {served!r}, and {asked!r} was asked for: give its name, or "
                f"start it with --name {asked}"
            )

    async def _ask(self, content: dict[str, Any], *, stream: bool) -> httpx.Response:
        """A good answer to /completions, of which a stream is still to be read. Asks again where the server is busy or
        gone: the seed is the same, and so is the answer.

        Raises PromptTooLong, Unsupported, ConfigurationError, or EndpointError.
        """
        pause = FIRST_PAUSE_S
        for left in reversed(range(self._endpoint.attempts)):
            wait: float | None = None
            try:
                asked = self._client.build_request("POST", "completions", json=content)
                response = await self._client.send(asked, stream=stream)
                if response.is_success:
                    return response
                await response.aread()
            except httpx.TransportError as gone:
                error: Exception = EndpointError(f"{self._endpoint.url}: {gone!r}")
            else:
                error, wait = self._error(response), _retry_after(response)
                if response.status_code not in PASSING:
                    raise error
            if not left:
                raise error
            self._tell(error)
            await self._sleep(min(LONGEST_PAUSE_S, pause if wait is None else wait))
            pause *= 2
        raise AssertionError("there is at least one attempt")

    def _tell(self, error: Exception) -> None:
        """Say, now and then, that requests are asked again: there may be hundreds."""
        if (now := time.monotonic()) - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            logger.warning("asking again, and so until it answers: %s", error)

    def _error(self, response: httpx.Response) -> Exception:
        try:
            found = response.json()
        except ValueError:
            found = response.text
        error = found.get("error") if isinstance(found, dict) else None
        message, code = _message(found), error.get("code") if isinstance(error, dict) else None
        if response.status_code in (401, 403):
            named = self._endpoint.token_file or self._endpoint.token_variable or "none is given"
            return ConfigurationError(f"{self._endpoint.url} refuses the token ({named}): {message}")
        if response.status_code == 400 and (code == "context_length_exceeded" or "context length" in message):
            return PromptTooLong(message)
        if response.status_code == 400 and code == "unsupported_parameter":
            return Unsupported(f"{message} ({self._endpoint.url})")
        return EndpointError(f"{self._endpoint.url}: HTTP {response.status_code}: {message}")


def _message(found: Any) -> str:
    """What an error says, in the format of OpenAI or in another one."""
    error = found.get("error", found) if isinstance(found, dict) else found
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:500]


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds that the server asks to wait."""
    said = response.headers.get("retry-after", "")
    return float(said) if said.isdecimal() else None


def authorization(endpoint: Endpoint) -> dict[str, str]:
    """The header with the endpoint's token; nothing where it has none. Raises ConfigurationError."""
    if endpoint.token_file is not None:
        try:
            token = endpoint.token_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"the token file {endpoint.token_file} cannot be read: {error}") from error
    elif endpoint.token_variable is not None:
        token = os.environ.get(endpoint.token_variable, "")
    else:
        return {}
    if not token or not token.isascii() or not token.isprintable():
        where = endpoint.token_file or f"${endpoint.token_variable}"
        raise ConfigurationError(f"{where} holds no token: one line of printable characters")
    return {"Authorization": f"Bearer {token}"}
