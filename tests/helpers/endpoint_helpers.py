"""A policy endpoint within the test, with given answers, and OpenAI's client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from server_helpers import byte_tokenizer

from megatron_rl.agent.endpoint.endpoint import PolicyEndpoint
from megatron_rl.agent.endpoint.session import RolloutSession
from megatron_rl.agent.scoring import CheckedReward
from megatron_rl.generate.engine.scripted import Answers, ScriptedInference
from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.chat_section import EndpointConfig
from megatron_rl.recipe.inference import Sampling

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SAMPLING = Sampling(max_new_tokens=100)
USER = {"role": "user", "content": "hi"}
T = TypeVar("T")


@dataclass(frozen=True)
class Opened:
    """A session of an endpoint, and its clients."""

    endpoint: PolicyEndpoint
    session: RolloutSession
    engine: ScriptedInference
    openai: AsyncOpenAI
    http: httpx.AsyncClient
    """Plain client, with the session in its base URL and no header."""
    tokenizer: Tokenizer

    @property
    def prompts(self) -> list[str]:
        """Text of each prompt that the engine got."""
        return [self.tokenizer.decode(one.prompt_tokens, special=True) for one in self.engine.requests]

    def sequences(self) -> list[tuple[str, str]]:
        """Text of each sequence of the trajectory, and of what is trained of it."""
        return [
            (
                self.tokenizer.decode(one.tokens, special=True),
                self.tokenizer.decode(
                    [token for token, own in zip(one.tokens, one.loss_mask, strict=True) if own], special=True
                ),
            )
            for one in self.session.trajectory(CheckedReward(1.0, {})).sequences
        ]


@asynccontextmanager
async def opened(
    answers: Answers = ("hello",),
    *,
    tokenizer: Tokenizer | None = None,
    sampling: Sampling = SAMPLING,
    engine: Any = None,
    choice: str = "run",
    **config: Any,
) -> AsyncIterator[Opened]:
    """Open a session. choice: who chooses the sampling. config: further keys of EndpointConfig."""
    from openai import AsyncOpenAI  # slow to import

    tokenizer = tokenizer or byte_tokenizer()
    engine = engine or ScriptedInference(tokenizer, answers, max_length=1000)
    endpoint = await PolicyEndpoint.open(Chat(tokenizer), EndpointConfig(sampling=choice, **config))
    try:
        async with endpoint.session(engine, sampling, 1, None) as session:
            http = httpx.AsyncClient(base_url=session.base_url, timeout=30, trust_env=False, verify=False)
            openai = AsyncOpenAI(
                base_url=session.base_url, api_key=session.api_key, max_retries=0, timeout=30, http_client=http
            )
            async with http:  # loading certificates would take longer than most tests
                yield Opened(endpoint, session, engine, openai, http, tokenizer)
    finally:
        await asyncio.wait_for(endpoint.close(), 10)


def with_session(work: Callable[[Opened], Awaitable[T]], answers: Answers = ("hello",), **options: Any) -> T:
    """Return the result of `work` with a new session. answers, options: see `opened`."""

    async def run() -> T:
        async with opened(answers, **options) as one:
            return await asyncio.wait_for(work(one), 30)

    return asyncio.run(run())
