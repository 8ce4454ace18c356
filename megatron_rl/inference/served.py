"""External servers, with the run's weights, as the engine of a rollout driver."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import httpx

from megatron_rl.inference.api import Completion, GenerationRequest, PartialAnswer
from megatron_rl.inference.config import Servers
from megatron_rl.inference.openai import FIRST_PAUSE_S, LOG_EVERY_S, LONGEST_PAUSE_S, EndpointAway, OpenAIInference
from megatron_rl.inference.openai_bodies import Endpoint, UnusableAnswer
from megatron_rl.inference.sglang import SGLangInference
from megatron_rl.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def endpoints_of(servers: Servers, *, processed_logprobs: bool = False) -> list[Endpoint]:
    """Return the endpoint of each server. A request to one is tried once, since another one may answer.

    processed_logprobs: see `Endpoint`.
    """
    return [
        Endpoint(
            url=url,
            model=servers.model,
            kind=servers.kind,
            token_file=None if servers.token_file is None else Path(servers.token_file).expanduser(),
            token_variable=servers.token_variable,
            timeout_s=servers.answer_limit_s,
            attempts=1,
            processed_logprobs=processed_logprobs,
        )
        for url in servers.urls
    ]


def inference_of(
    endpoint: Endpoint, tokenizer: Tokenizer | None = None, transport: httpx.AsyncBaseTransport | None = None
) -> OpenAIInference:
    """Return the client of a server, by its kind. transport: for tests."""
    kind = SGLangInference if endpoint.kind == "sglang" else OpenAIInference
    return kind(endpoint, tokenizer, transport=transport)


class _Server:
    """A server as the target of requests."""

    def __init__(self, endpoint: Endpoint, inference: OpenAIInference) -> None:
        self.endpoint, self.inference = endpoint, inference
        self.outstanding = 0
        """Most tokens that it still has to compute, of prompts and answers."""
        self.away_until = 0.0  # monotonic
        self.pause = FIRST_PAUSE_S

    def note_away(self, now: float) -> None:
        """Leave it alone for a while, which doubles each time. Many requests may notice that it is away."""
        if now >= self.away_until:
            self.away_until = now + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE_S)


class ServedPolicy:
    """Implements `ResumableInference` over servers that sample with the same weights. A request goes to the one with
    the fewest outstanding tokens, and to another one if that is away."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        tokenizer: Tokenizer,
        limit_s: float,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """
        limit_s: seconds that all servers may be away.
        transport, sleep: for tests.
        """
        self._tokenizer, self._transport = tokenizer, transport
        self._tokens = tokenizer.vocab_size
        self._servers: list[_Server] = []
        self.use(endpoints)
        self._limit_s, self._sleep = limit_s, sleep
        self._logged_at = -math.inf
        self.busy_s = 0.0
        """Sum of the seconds that its requests took: it grows with every answer."""

    def use(self, endpoints: Sequence[Endpoint]) -> None:
        """Send requests to these servers from now on; without any, requests wait. Those that were asked before still
        answer. Belongs to the loop of the requests."""
        known = {server.endpoint: server for server in self._servers}
        self._servers = [
            known.get(each) or _Server(each, inference_of(each, self._tokenizer, self._transport)) for each in endpoints
        ]

    @property
    def policy_version(self) -> int:
        """Version of the weights of the servers."""
        return self._servers[0].inference.policy_version

    @policy_version.setter
    def policy_version(self, policy_version: int) -> None:
        for each in self._servers:
            each.inference.policy_version = policy_version

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Answer a request. No server can resume an answer, so known tokens are sampled again.

        Raises EndpointError, and UnusableAnswer also if a server uses tokens that the run's tokenizer does not have.
        """
        cost = len(request.prompt_tokens) + request.num_samples * request.sampling.max_new_tokens
        fresh = replace(request, known={})
        completions = await self._ask(cost, lambda server: server.generate(fresh))
        if (token := max(max(one.tokens) for one in completions)) >= self._tokens:
            raise UnusableAnswer(
                f"a server sampled token {token}, but the run's tokenizer has only {self._tokens} tokens: start the "
                "server on the folder that the run writes, and give the run the tokenizer of model.huggingface"
            )
        return completions

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-prob of each token after the first, given those before it, at temperature 1. Raises EndpointError, and
        UnusableAnswer if a server does not report them."""
        return await self._ask(len(tokens), lambda server: server.score(tokens))

    async def _ask(self, cost: int, ask: Callable[[OpenAIInference], Awaitable[Result]]) -> Result:
        """Return the answer of a server; of another one if that is away.

        cost: most tokens that the server has to compute.
        """
        began = time.monotonic()
        answer = await self._answer(cost, ask)
        self.busy_s += time.monotonic() - began
        return answer

    async def _answer(self, cost: int, ask: Callable[[OpenAIInference], Awaitable[Result]]) -> Result:
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
            server.outstanding += cost
            try:
                answer = await ask(server.inference)
            except EndpointAway as away:
                server.note_away(time.monotonic())
                if waited > self._limit_s:
                    raise
                self._log(away)
            else:
                server.pause = FIRST_PAUSE_S
                return answer
            finally:
                server.outstanding -= cost

    def _log(self, away: EndpointAway) -> None:
        """Log only now and then: hundreds of requests may be waiting."""
        if (now := time.monotonic()) - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            logger.warning("requests are repeated until a server answers: %s", away)

    def partial_answers(self) -> list[PartialAnswer]:
        """Return nothing: a server reports an answer only when it is complete."""
        return []
