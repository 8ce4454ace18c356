"""HTTP routes of the inference server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megatron_rl.agent.server.bodies import ChatBody, CompletionBody, parse
from megatron_rl.agent.server.event_stream import EventStream, unless_gone
from megatron_rl.agent.server.request_parsing import ParsedRequest, ServedModel
from megatron_rl.agent.server.service import GenerationService
from megatron_rl.generate.engine.engine_thread import EngineThread
from megatron_rl.generate.engine.interface import SteppedEngine
from megatron_rl.generate.serving.access import Guard, ServerLimits, read_body
from megatron_rl.generate.serving.api_errors import ApiError
from megatron_rl.generate.serving.error_responses import ERROR_HANDLERS
from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PROBED = frozenset({"/health", "/ping", "/version"})
"""Routes without a token, which load balancers and Kubernetes ask."""


class Application:
    def __init__(
        self,
        engine: SteppedEngine,
        tokenizer: Tokenizer,
        *,
        model: str,
        max_length: int,
        tokens: Sequence[str],
        limits: ServerLimits | None = None,
    ) -> None:
        """
        model: its name for clients.
        max_length: most tokens of a prompt and its answer together.
        tokens: bearer tokens that give access.
        """
        limits = limits or ServerLimits()
        self.thread = EngineThread(engine)
        self._limits = limits
        self._model = ServedModel(model, Chat(tokenizer).check(), max_length)
        self._card = self._model.card | {"max_model_len": max_length}
        self._service = GenerationService(self.thread, tokenizer, limits.max_waiting)
        routes: dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
            "/v1/completions": ("POST", self._completions),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/models": ("GET", self._models),
            "/v1/models/{model:path}": ("GET", self._one_model),
            "/health": ("GET", self._health),
            "/ping": ("GET", self._health),
            "/version": ("GET", self._version),
            "/load": ("GET", self._load),
        }
        app = Starlette(
            routes=[Route(path, handler, methods=[method]) for path, (method, handler) in routes.items()],
            exception_handlers=ERROR_HANDLERS,
            lifespan=self._lifespan,
        )
        self.guard = Guard(app, tokens, limits, PROBED)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.guard(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.thread.start()
        yield
        self.thread.stop("the server is shutting down")
        if not await asyncio.to_thread(self.thread.join):
            logger.warning("the engine is still in the middle of a step")

    async def _completions(self, request: Request) -> Response:
        return await self._answer(
            request, await self._model.completion(parse(CompletionBody, await read_body(request)))
        )

    async def _chat(self, request: Request) -> Response:
        body = parse(ChatBody, await read_body(request))
        return await self._answer(request, await self._model.chat(body))

    async def _answer(self, request: Request, asked: ParsedRequest) -> Response:
        self._model.check_model(asked.body.model)
        asked.body.refuse_other_logits()
        if not asked.body.stream:
            whole = await unless_gone(request.receive, self._service.whole(asked))
            return JSONResponse(whole)
        events = self._service.events(asked)
        first = await unless_gone(request.receive, anext(events))  # an error before it still gets an HTTP status
        return EventStream(first, events, self._limits.stall_s)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def _one_model(self, request: Request) -> Response:
        self._model.check_model(request.path_params["model"])
        return JSONResponse(self._card)

    async def _health(self, request: Request) -> Response:
        if not self.thread.alive:
            raise ApiError(503, "the engine has stopped", code="engine_stopped")
        return JSONResponse({"status": "ok"})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": version("mrl")})

    async def _load(self, request: Request) -> Response:
        load = self.thread.load
        shown = ("running", "waiting", "free_pages", "pages", "preemptions")
        return JSONResponse({"open_requests": self.guard.open, **{name: getattr(load, name) for name in shown}})
