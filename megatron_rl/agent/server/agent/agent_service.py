"""HTTP routes of an agent server, see agent/remote/agent_wire.py."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from megatron_rl.agent.api import (
    Demonstrator,
    Environment,
    EvaluationRequest,
    EvaluationResponse,
    GroupRolloutRequest,
    RolloutRequest,
)
from megatron_rl.agent.remote.agent_wire import (
    EVALUATION,
    PAGE,
    POLL_S,
    PROTOCOL,
    TRAINING,
    AgentDescription,
    AgentRequest,
    decode_agent_request,
    digest_of,
)
from megatron_rl.agent.server.agent.sessions import AgentSession, Sessions, UnknownSession
from megatron_rl.agent.trajectories import Problem
from megatron_rl.generate.engine.api import InferenceInterface
from megatron_rl.generate.replicas.wire import Garbled
from megatron_rl.generate.serving.access import read_body, with_token
from megatron_rl.generate.serving.api_errors import ApiError

logger = logging.getLogger(__name__)

BODY_BYTES = 2**28
"""Most bytes of a request body: all answers to a prompt, with up to three numbers for each token."""

Work = Callable[[AgentRequest, InferenceInterface], Awaitable[EvaluationResponse]]


class OtherAgent(Exception):
    """A request comes from ranks that expect another agent."""


class AgentService:
    def __init__(self, name: str, environment: Environment) -> None:
        self._environment = environment
        self._sets: dict[str, Sequence[Problem]] = {
            TRAINING: environment.training_problems(),
            **{f"{EVALUATION}{name}": problems for name, problems in environment.evaluation_problems().items()},
        }
        counts = {name: len(problems) for name, problems in self._sets.items()}
        taught = environment.demonstrations() if isinstance(environment, Demonstrator) else ()
        self._demonstrations = taught
        self.about = AgentDescription(
            PROTOCOL,
            name,
            digest_of(self._sets),
            counts,
            environment.prompt_format,
            len(taught),
            environment.compares_answers,
        )
        self.sessions = Sessions()

    @asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        watch = asyncio.ensure_future(self.sessions.end_forgotten())
        yield
        watch.cancel()
        await self.sessions.close()
        await self._environment.close()

    def problems(self, name: str, first: int) -> dict[str, Any]:
        if name not in self._sets:
            raise Garbled(f"there is no set {name!r}, only {', '.join(self._sets)}")
        return {"prompts": [problem.prompt for problem in self._sets[name][first : first + PAGE]]}

    def demonstrations(self, first: int) -> dict[str, Any]:
        return {"pairs": self._demonstrations[first : first + PAGE]}

    def begin(self, kind: Work, body: Any) -> AgentSession:
        """Start a session. Raises Garbled or Conflict."""
        if body.get("protocol") != PROTOCOL:
            raise OtherAgent(f"protocol {body.get('protocol')}: this agent uses {PROTOCOL}")
        if body.get("digest") != self.about.digest:
            raise OtherAgent(f"the problems of this agent ({self.about.environment}) have changed since the run began")
        asked = decode_agent_request(body["request"])
        for place in asked.problems:
            self._problem(*place)

        async def work(inference: InferenceInterface) -> EvaluationResponse:
            return await kind(asked, inference)

        return self.sessions.begin(work)

    async def group_rollout(self, asked: AgentRequest, inference: InferenceInterface) -> EvaluationResponse:
        group = await self._environment.group_rollout(self._of_a_group(asked, inference))
        return EvaluationResponse([group.trajectories], group.failures)

    async def contrastive_rollout(self, asked: AgentRequest, inference: InferenceInterface) -> EvaluationResponse:
        found = await self._environment.contrastive_rollout(self._of_a_group(asked, inference))
        return EvaluationResponse([[found.pair.chosen, found.pair.rejected] if found.pair else []], found.failures)

    async def rollouts(self, asked: AgentRequest, inference: InferenceInterface) -> EvaluationResponse:
        problems = [self._problem(*place) for place in asked.problems]
        request = RolloutRequest(problems, asked.sampling, asked.key, inference, asked.limits)
        return await self._environment.rollouts(request)

    async def evaluate(self, asked: AgentRequest, inference: InferenceInterface) -> EvaluationResponse:
        problems = [self._problem(*place) for place in asked.problems]
        request = EvaluationRequest(
            problems=problems,
            sampling=asked.sampling,
            samples_per_problem=asked.samples,
            key=asked.key,
            inference=inference,
            limits=asked.limits,
        )
        response = await self._environment.evaluate(request)
        if not self._environment.compares_answers:
            return response
        agents = map(self._environment.agent_of, problems)
        finals = {
            place: [agent.final_answer(answer.text) for answer in answers]
            for place, (agent, answers) in enumerate(zip(agents, response.trajectories, strict=True))
        }
        return replace(response, final_answers=finals | {**response.final_answers})

    def _of_a_group(self, asked: AgentRequest, inference: InferenceInterface) -> GroupRolloutRequest:
        (place,) = asked.problems
        return GroupRolloutRequest(
            ordinal=asked.ordinal or 0,
            problem=self._problem(*place),
            group_size=asked.samples,
            sampling=asked.sampling,
            key=asked.key,
            inference=inference,
            limits=asked.limits,
        )

    def _problem(self, name: str, number: int) -> Problem:
        problems = self._sets.get(name, ())
        if not 0 <= number < len(problems):
            raise Garbled(f"there is no problem {number} in the set {name!r}")
        return problems[number]


def application(service: AgentService, tokens: Sequence[str]) -> ASGIApp:

    async def about(request: Request) -> Mapping[str, Any]:
        return asdict(service.about)

    async def problems(request: Request) -> Mapping[str, Any]:
        return service.problems(request.query_params["set"], int(request.query_params["first"]))

    async def demonstrations(request: Request) -> Mapping[str, Any]:
        return service.demonstrations(int(request.query_params["first"]))

    def begins(kind: Work) -> Callable[[Request], Awaitable[Response]]:
        async def begin(request: Request) -> Mapping[str, Any]:
            return {"session": service.begin(kind, await _body(request)).id}

        return _answered(begin)

    async def poll(request: Request) -> Mapping[str, Any]:
        body = await _body(request)
        return await service.sessions.get(request.path_params["id"]).poll(body["known"], POLL_S)

    async def answers(request: Request) -> Mapping[str, Any]:
        body = await _body(request)
        service.sessions.get(request.path_params["id"]).answer(body["answers"])
        return {}

    async def end(request: Request) -> Mapping[str, Any]:
        await service.sessions.end(request.path_params["id"])
        return {}

    routes = [
        Route("/about", _answered(about), methods=["GET"]),
        Route("/problems", _answered(problems), methods=["GET"]),
        Route("/demonstrations", _answered(demonstrations), methods=["GET"]),
        Route("/rollouts", begins(service.rollouts), methods=["POST"]),
        Route("/grouped_rollouts", begins(service.group_rollout), methods=["POST"]),
        Route("/contrastive_rollouts", begins(service.contrastive_rollout), methods=["POST"]),
        Route("/evaluation", begins(service.evaluate), methods=["POST"]),
        Route("/sessions/{id}/poll", _answered(poll), methods=["POST"]),
        Route("/sessions/{id}/answers", _answered(answers), methods=["POST"]),
        Route("/sessions/{id}", _answered(end), methods=["DELETE"]),
    ]
    app = Starlette(routes=routes, lifespan=service.running)
    return with_token(app, tokens, BODY_BYTES)


def _answered(handler: Callable[[Request], Awaitable[Mapping[str, Any]]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            text = json.dumps(await handler(request), allow_nan=False)  # ASCII, since errors may quote invalid text
            return Response(text, media_type="application/json")
        except ApiError as error:
            return error.response()
        except OtherAgent as error:
            return PlainTextResponse(str(error), 409)
        except UnknownSession as error:
            return PlainTextResponse(f"there is no session {error}", 404)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return PlainTextResponse(repr(error)[:300], 400)

    return answer


async def _body(request: Request) -> Mapping[str, Any]:
    body = json.loads(await read_body(request))
    if not isinstance(body, dict):
        raise Garbled("the body is not a JSON object")
    return body
