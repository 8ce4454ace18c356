"""HTTP route of a replica that holds the teacher: log-probs of prompts, in the bodies of `mrl serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from megatron_rl.inference.api import GenerationRequest
from megatron_rl.inference.config import Sampling
from megatron_rl.inference.openai import scoring_answer
from megatron_rl.server.access import with_token
from megatron_rl.server.engine_thread import EngineGone, EngineThread

Score = Callable[[list[int]], Awaitable[list[float]]]
"""Log-prob of each token after the first, given those before it. Raises ValueError for tokens that the model does not
have, and EngineGone."""


def scoring_application(score: Score, token: str) -> ASGIApp:
    """Return the application, which admits requests with the run's token."""

    async def completions(request: Request) -> Response:
        try:
            tokens = [int(each) for each in (await request.json())["prompt"]]
            return JSONResponse(scoring_answer(tokens, await score(tokens)))
        except EngineGone as error:
            return _error(503, error)
        except (ValueError, KeyError, TypeError) as error:
            return _error(400, error)

    return with_token(Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])]), [token])


def _error(status: int, error: Exception) -> Response:
    return JSONResponse({"error": {"message": str(error) or repr(error)}}, status)


async def score_by(thread: EngineThread, tokens: list[int]) -> list[float]:
    """`Score` by an engine, which also samples a token."""
    news = asyncio.Event()
    request = GenerationRequest(tokens, 1, Sampling(max_new_tokens=1), key=0, prompt_logprobs=0)
    subscription = thread.submit(request, streamed=False, news=news)
    try:
        while True:
            await news.wait()
            news.clear()
            for delta in subscription.unread():
                if delta.prompt is not None:
                    return delta.prompt.logprobs
    finally:
        subscription.close()
