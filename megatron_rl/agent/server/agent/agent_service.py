"""HTTP routes of an agent server, see agent/remote/agent_wire.py."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from megatron_rl.agent.api import Demonstrator, Environment, GroupRolloutRequest
from megatron_rl.agent.remote.agent_wire import (
    EVALUATION,
    POLL_S,
    PROTOCOL,
    TRAINING,
    AgentDescription,
    AgentRequest,
    decode_completions,
    decode_refusal,
    encode_refusal,
    encode_result,
)
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.contract.bounded_json import bounded_json
from megatron_rl.generate.engine.interface import Completion, GenerationRequest, InferenceInterface
from megatron_rl.generate.replicas.wire import REFUSED, Garbled, encode_request
from megatron_rl.generate.serving.access import read_body, with_token
from megatron_rl.generate.serving.api_errors import ApiError
from megatron_rl.generate.serving.error_responses import response_to

logger = logging.getLogger(__name__)

BODY_BYTES = 2**28
"""Most bytes of a request body: all answers to a prompt, with up to three numbers for each token."""


FORGOTTEN_S = 120.0
"""Seconds without a poll after which a session is dropped: the ranks, which poll every few seconds, have gone."""

Work = Callable[[InferenceInterface], Coroutine[Any, Any, TrajectoryGroup]]


class OtherAgent(Exception):
    """A request comes from ranks that expect another agent."""


class UnknownSession(Exception):
    """There is no such session, or not any more."""


class AgentSession:
    """One request, from its start until its result was delivered. Implements `InferenceInterface`."""

    def __init__(self, work: Work) -> None:
        self.id = uuid4().hex
        self._asked: dict[str, tuple[GenerationRequest, asyncio.Future[list[Completion]]]] = {}
        self._withdrawn: set[str] = set()  # requests whose caller has left
        self._refusals: list[Exception] = []  # errors of requests that the engine cannot answer
        self._changed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(work(self))
        self._task.add_done_callback(lambda _: self._changed.set())
        self._heard_at = time.monotonic()

    @property
    def forgotten(self) -> bool:
        return time.monotonic() - self._heard_at > FORGOTTEN_S

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        answer: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._asked[request.id] = request, answer
        self._changed.set()
        try:
            return await answer
        finally:
            del self._asked[request.id]
            if answer.cancelled():
                self._withdrawn.add(request.id)
                self._changed.set()

    async def poll(self, known: Collection[str], wait_s: float) -> dict[str, Any]:
        """Return requests to the model other than `known`, those of `known` that were withdrawn, the result, or the
        agent's error. Waits up to `wait_s` seconds for one of them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not (self._task.done() or self._asked.keys() - set(known) or self._withdrawn & set(known)):
                    self._changed.clear()
                    await self._changed.wait()
        self._heard_at = time.monotonic()
        if not self._task.done():
            withdrawn = self._withdrawn & set(known)
            self._withdrawn -= withdrawn
            asks = [encode_request(one) for id, (one, _) in self._asked.items() if id not in known]
            return {"asks": asks, "withdrawn": [*withdrawn]}
        error = None if self._task.cancelled() else self._task.exception()
        if error is None:
            return {"result": encode_result(self._task.result())}
        if isinstance(error, REFUSED) and any(error is refusal for refusal in self._refusals):
            return {"error": encode_refusal(error)}
        return {"error": {"kind": "error", "message": f"{type(error).__name__}: {error}"[:300]}}

    def answer(self, answers: Mapping[str, Any]) -> None:
        """Take answers of the model, or why it cannot answer. Requests that are answered or withdrawn are skipped.
        Raises Garbled."""
        self._heard_at = time.monotonic()
        for id, said in answers.items():
            _, waiting = self._asked.get(id, (None, None))
            if waiting is None or waiting.done():
                continue
            if isinstance(said, Mapping):
                self._refusals.append(decode_refusal(said))
                waiting.set_exception(self._refusals[-1])
            else:
                waiting.set_result(decode_completions(said))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


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
        self._sessions: dict[str, AgentSession] = {}

    @asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        watch = asyncio.ensure_future(self._end_forgotten())
        yield
        watch.cancel()
        for id in list(self._sessions):
            await self.end(id)
        await self._environment.close()

    def begin(self, body: Mapping[str, Any]) -> AgentSession:
        """Start a session. Raises OtherAgent, and ValueError or KeyError for a body that is not a request."""
        if body["protocol"] != PROTOCOL:
            raise OtherAgent(f"protocol {body['protocol']}: this agent uses {PROTOCOL}")
        if body["digest"] != self._digest:
            raise OtherAgent(f"the problems of this agent ({self.about.environment}) have changed since the run began")
        asked = AgentRequest.model_validate(body["request"])
        problem = self._sets[asked.set][asked.number]
        session = AgentSession(partial(self._rollout, asked, problem))
        self._sessions[session.id] = session
        return session

    def session(self, id: str) -> AgentSession:
        """Raises UnknownSession."""
        if id not in self._sessions:
            raise UnknownSession(id)
        return self._sessions[id]

    async def end(self, id: str) -> None:
        if session := self._sessions.pop(id, None):
            await session.close()

    async def _end_forgotten(self) -> None:
        while True:
            await asyncio.sleep(FORGOTTEN_S / 4)
            for id in [id for id, session in self._sessions.items() if session.forgotten]:
                await self.end(id)

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
        return await service.session(request.path_params["id"]).poll(body["known"], POLL_S)

    async def answers(request: Request) -> Mapping[str, Any]:
        body = await _body(request)
        service.session(request.path_params["id"]).answer(body["answers"])
        return {}

    async def end(request: Request) -> Mapping[str, Any]:
        await service.end(request.path_params["id"])
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
            return response_to(error)
        except OtherAgent as error:
            return PlainTextResponse(str(error), 409)
        except UnknownSession as error:
            return PlainTextResponse(f"there is no session {error}", 404)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return PlainTextResponse(repr(error)[:300], 400)

    return answer


async def _body(request: Request) -> Mapping[str, Any]:
    body = bounded_json(await read_body(request))
    if not isinstance(body, dict):
        raise Garbled("the body is not a JSON object")
    return body
