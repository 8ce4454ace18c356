"""A replica with another model than the policy, whose weights never change: the teacher, which returns log-probs of
prompts in the bodies of `mrl serve`, or the reward model, a classifier with the bodies of vLLM."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import Field, NonNegativeInt
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.bounded_json import bounded_json
from megatron_rl.contract.paths import Replica
from megatron_rl.generate.engine.engine_thread import EngineGone
from megatron_rl.generate.engine.interface import TokenScore
from megatron_rl.generate.engine.openai import scoring_answer
from megatron_rl.generate.replica.lifecycle import BODY_BYTES, Running, first_of
from megatron_rl.generate.replicas.wire import Received, TokenId, decode
from megatron_rl.generate.serving.access import read_body, with_token
from megatron_rl.generate.serving.api_errors import ApiError
from megatron_rl.generate.serving.error_responses import response_to

LOOK_S = 1.0
"""Seconds between two looks for the outcome of the run, in a shared folder."""


class _ScoringBody(Received):
    prompt: Annotated[list[TokenId], Field(min_length=1)]
    prompt_logprobs: NonNegativeInt


class Scorer(Running, Protocol):
    async def score(self, tokens: list[int], top: int) -> list[TokenScore]:
        """Score each token after the first, given those before it.

        top: likeliest tokens to return at each position.

        Raises ValueError for tokens that the model does not have, or too large a `top`, and EngineGone.
        """
        ...


class Classifier(Running, Protocol):
    async def classify(self, body: dict[str, Any]) -> dict[str, Any]:
        """Response to a request of vLLM's route /classify. Raises ValueError if it is refused, and EngineGone."""
        ...


class FixedModelService(ABC):
    """Has one route. Implements `Service`."""

    path: ClassVar[str]

    def __init__(self, engine: Running, replica: Replica, address: ReplicaAddress, token: str) -> None:
        self.address = address
        routes = [Route(self.path, self._answered, methods=["POST"])]
        self.app = with_token(Starlette(routes=routes), [token], BODY_BYTES)
        self.engine, self._replica = engine, replica
        self.over = False

    @abstractmethod
    async def answer(self, body: Any) -> dict[str, Any]:
        """Response to a request. Raises ValueError, KeyError or TypeError if the request is wrong, and EngineGone."""

    async def until_over(self, asked: asyncio.Event, limit_s: float) -> None:
        """Return when the ranks of the run have left, or are asked to leave; where they end otherwise, the host side
        ends the replica."""
        while not (asked.is_set() or await asyncio.to_thread(self._replica.attempt.outcome.exists)):
            await first_of(asked.wait(), limit_s=LOOK_S)
        self.over = not asked.is_set()

    async def _answered(self, request: Request) -> Response:
        try:
            return JSONResponse(await self.answer(bounded_json(await read_body(request))))
        except EngineGone as error:
            return _error(503, error)
        except ApiError as error:
            return response_to(error)
        except (ValueError, KeyError, TypeError) as error:
            return _error(400, error)


class ScoringService(FixedModelService):
    path = "/v1/completions"

    def __init__(self, scorer: Scorer, *of_replica: Any) -> None:
        super().__init__(scorer, *of_replica)
        self._scorer = scorer

    async def answer(self, body: Any) -> dict[str, Any]:
        asked = decode(_ScoringBody, body, "a request")
        return scoring_answer(asked.prompt, await self._scorer.score(asked.prompt, asked.prompt_logprobs))


class ClassifyingService(FixedModelService):
    path = "/v1/classify"

    def __init__(self, classifier: Classifier, *of_replica: Any) -> None:
        super().__init__(classifier, *of_replica)
        self._classifier = classifier

    async def answer(self, body: Any) -> dict[str, Any]:
        return await self._classifier.classify(dict(body))


def _error(status: int, error: Exception) -> Response:
    return JSONResponse({"error": {"message": str(error) or repr(error)}}, status)
