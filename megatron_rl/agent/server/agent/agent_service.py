"""HTTP routes of an agent server, see agent/remote/agent_wire.py."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from megatron_rl.agent.api import Demonstrator, Environment, GroupRolloutRequest
from megatron_rl.agent.remote.agent_wire import EVALUATION, POLL_S, PROTOCOL, TRAINING, AgentDescription, AgentRequest
from megatron_rl.agent.server.agent.sessions import AgentSession, Sessions, UnknownSession
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.generate.engine.interface import InferenceInterface
from megatron_rl.generate.replicas.wire import Garbled
from megatron_rl.generate.serving.access import read_body, with_token
from megatron_rl.generate.serving.api_errors import ApiError

logger = logging.getLogger(__name__)

BODY_BYTES = 2**28
"""Most bytes of a request body: all answers to a prompt, with up to three numbers for each token."""


class OtherAgent(Exception):
    """A request comes from ranks that expect another agent."""


class AgentService:
    def __init__(self, name: str, environment: Environment) -> None:
        self._environment = environment
        self._sets: dict[str, Sequence[Problem]] = {
            TRAINING: environment.training_problems(),
            **{f"{EVALUATION}{name}": problems for name, problems in environment.evaluation_problems().items()},
        }
        self.about = AgentDescription(
            protocol=PROTOCOL,
            environment=name,
            prompt_format=environment.prompt_format,
            compares_answers=environment.compares_answers,
            sets={name: [problem.prompt for problem in problems] for name, problems in self._sets.items()},
            demonstrations=[*environment.demonstrations()] if isinstance(environment, Demonstrator) else [],
        )
        self._digest = self.about.digest
        self.sessions = Sessions()

    @asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        watch = asyncio.ensure_future(self.sessions.end_forgotten())
        yield
        watch.cancel()
        await self.sessions.close()
        await self._environment.close()

    def begin(self, body: Mapping[str, Any]) -> AgentSession:
        """Start a session. Raises OtherAgent, and ValueError or KeyError for a body that is not a request."""
        if body["protocol"] != PROTOCOL:
            raise OtherAgent(f"protocol {body['protocol']}: this agent uses {PROTOCOL}")
        if body["digest"] != self._digest:
            raise OtherAgent(f"the problems of this agent ({self.about.environment}) have changed since the run began")
        asked = AgentRequest.model_validate(body["request"])
        problem = self._sets[asked.set][asked.number]
        return self.sessions.begin(partial(self._rollout, asked, problem))

    async def _rollout(self, asked: AgentRequest, problem: Problem, inference: InferenceInterface) -> TrajectoryGroup:
        group = await self._environment.group_rollout(
            GroupRolloutRequest(
                asked.ordinal, problem, asked.samples, asked.sampling, asked.key, inference, asked.limits
            )
        )
        if asked.ordinal is not None or not self._environment.compares_answers:
            return group
        agent = self._environment.agent_of(problem)
        return replace(group, final_answers=[agent.final_answer(answer.text) for answer in group.trajectories])


def application(service: AgentService, tokens: Sequence[str]) -> ASGIApp:

    async def about(request: Request) -> Mapping[str, Any]:
        return service.about.model_dump()

    async def begin(request: Request) -> Mapping[str, Any]:
        return {"session": service.begin(await _body(request)).id}

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
        Route("/rollouts", _answered(begin), methods=["POST"]),
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
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return PlainTextResponse(repr(error)[:300], 400)

    return answer


async def _body(request: Request) -> Mapping[str, Any]:
    body = json.loads(await read_body(request))
    if not isinstance(body, dict):
        raise Garbled("the body is not a JSON object")
    return body
