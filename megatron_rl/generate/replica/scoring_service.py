"""A replica that holds the teacher, whose weights never change: log-probs of prompts, in the bodies of `mrl serve`."""

from __future__ import annotations

import asyncio
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.paths import Replica
from megatron_rl.generate.engine.engine_thread import EngineGone
from megatron_rl.generate.engine.interface import TokenScore
from megatron_rl.generate.engine.openai import scoring_answer
from megatron_rl.generate.replica.lifecycle import Running, first_of
from megatron_rl.generate.serving.access import with_token

LOOK_S = 1.0
"""Seconds between two looks for the outcome of the run, in a shared folder."""


class Scorer(Running, Protocol):
    async def score(self, tokens: list[int], top: int) -> list[TokenScore]:
        """Score each token after the first, given those before it.

        top: likeliest tokens to return at each position.

        Raises ValueError for tokens that the model does not have, or too large a `top`, and EngineGone.
        """
        ...


class ScoringService:
    """Implements `Service`."""

    def __init__(self, scorer: Scorer, replica: Replica, address: ReplicaAddress, token: str) -> None:
        self.address = address
        self.app = with_token(
            Starlette(routes=[Route("/v1/completions", self._completions, methods=["POST"])]), [token]
        )
        self.engine, self._replica = scorer, replica
        self.over = False

    async def until_over(self, asked: asyncio.Event, limit_s: float) -> None:
        """Return when the ranks of the run have left, or are asked to leave; where they end otherwise, the host side
        ends the replica."""
        while not (asked.is_set() or await asyncio.to_thread(self._replica.attempt.outcome.exists)):
            await first_of(asked.wait(), limit_s=LOOK_S)
        self.over = not asked.is_set()

    async def _completions(self, request: Request) -> Response:
        try:
            body = await request.json()
            tokens, top = [int(each) for each in body["prompt"]], int(body["prompt_logprobs"])
            return JSONResponse(scoring_answer(tokens, await self.engine.score(tokens, top)))
        except EngineGone as error:
            return _error(503, error)
        except (ValueError, KeyError, TypeError) as error:
            return _error(400, error)


def _error(status: int, error: Exception) -> Response:
    return JSONResponse({"error": {"message": str(error) or repr(error)}}, status)
