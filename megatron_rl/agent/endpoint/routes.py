"""HTTP routes of the policy endpoint, for the session that a request names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megatron_rl.agent.endpoint.conversations import KnownConversation
from megatron_rl.agent.endpoint.responses_api import (
    ResponsesBody,
    answer_of,
    as_chat,
    events_of,
    new_messages,
    response_of,
)
from megatron_rl.agent.endpoint.session import MODEL, UNLIMITED, RolloutSession
from megatron_rl.agent.server.bodies import Body, ChatBody, CompletionBody, Items, TokenId, parse
from megatron_rl.agent.server.event_stream import unless_gone
from megatron_rl.agent.server.parameters import ADVICE
from megatron_rl.agent.server.request_parsing import ParsedRequest, ServedModel, no_template
from megatron_rl.agent.server.response_bodies import ChoiceFormat
from megatron_rl.agent.server.samples import AnswerPart, Prompt
from megatron_rl.agent.server.service import Events, whole_body
from megatron_rl.generate.serving.access import read_body
from megatron_rl.generate.serving.api_errors import (
    MOST_SAID,
    ApiError,
    invalid,
    invalid_conversation,
    unsupported,
)
from megatron_rl.generate.serving.error_responses import ERROR_HANDLERS
from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.chat.conversation import ConversationError
from megatron_rl.recipe.chat_section import EndpointConfig

AnyModel = TypeVar("AnyModel", bound=BaseModel)
Answer = Callable[[RolloutSession, bytes], Awaitable[Response]]


class Routes:
    def __init__(self, chat: Chat, config: EndpointConfig) -> None:
        self._chat, self._config = chat, config
        self._model = ServedModel(MODEL, chat, UNLIMITED)

    def application(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self._post(self._chat_completions), methods=["POST"]),
            Route("/v1/completions", self._post(self._completions), methods=["POST"]),
            Route("/v1/responses", self._post(self._responses), methods=["POST"]),
            Route("/inference/v1/generate", self._post(self._generate), methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._one_model, methods=["GET"]),
        ]
        return Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)

    def _post(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            session: RolloutSession = request.state.session
            body = await read_body(request)
            return await unless_gone(request.receive, session.while_open(answer(session, body)))

        return respond

    async def _chat_completions(self, session: RolloutSession, raw: bytes) -> Response:
        body = parse(ChatBody, raw)
        return self._response(*await self._chatted(session, body))

    async def _chatted(self, session: RolloutSession, body: ChatBody) -> tuple[ParsedRequest, dict[int, AnswerPart]]:
        """Answer a request of a chat. Raises ApiError."""
        self._model.check_model(body.model)
        conversation = None
        if not body.prompt_token_ids:
            prompt, conversation = self._prompt(session, body)
            body = body.model_copy(update={"prompt_token_ids": prompt})
        asked = await self._model.chat(body)
        return asked, await session.ask(asked, conversation)

    def _prompt(self, session: RolloutSession, body: ChatBody) -> tuple[list[int], KnownConversation]:
        if not self._chat.has_template:
            raise no_template()
        try:
            return session.prompt_of(KnownConversation.of(body.said, body.variables))
        except ConversationError as error:
            raise invalid_conversation(error) from error
        except ValueError as error:
            raise ApiError(
                400, f"messages: {str(error)[:MOST_SAID]}", param="messages", code="invalid_value"
            ) from error

    async def _responses(self, session: RolloutSession, raw: bytes) -> Response:
        body = parsed(ResponsesBody, raw)
        body.check()
        messages = [*session.messages_of(body.previous_response_id), *new_messages(body)]
        asked, parts = await self._chatted(session, as_chat(body, messages))
        response = response_of(body, whole_body(asked, parts))
        session.keep_response(response["id"], [*messages, *answer_of(response)])
        if not body.stream:
            return JSONResponse(response)
        return event_stream(b"".join(events_of(response)))

    async def _completions(self, session: RolloutSession, raw: bytes) -> Response:
        body = parse(CompletionBody, raw)
        self._model.check_model(body.model)
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        texts = [text for text in given if isinstance(text, str)]
        if len(texts) == 1 and not body.echo and (prompt := session.prompt_of_text(texts[0])) is not None:
            body = body.model_copy(update={"prompt": prompt})
        asked = await self._model.completion(body)
        return self._response(asked, await session.ask(asked, texts=texts))

    async def _generate(self, session: RolloutSession, raw: bytes) -> Response:
        asked_for = parsed(GenerateBody, raw)
        try:
            body = asked_for.completion()
        except ValidationError as error:
            raise invalid(error) from error
        self._model.check_model(body.model)
        asked = await self._model.completion(body)
        form = asked.form
        asked = replace(asked, form=GenerateFormat(form.model, form.names, form.likeliest, form.token_ids))
        return JSONResponse(whole_body(asked, await session.ask(asked)))

    def _response(self, asked: ParsedRequest, parts: dict[int, AnswerPart]) -> Response:
        if not asked.body.stream:
            return JSONResponse(whole_body(asked, parts))
        events = Events(asked)
        return event_stream(events.of(parts) + events.end())

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model.card]})

    async def _one_model(self, request: Request) -> Response:
        self._model.check_model(request.path_params["model"])
        return JSONResponse(self._model.card)


def parsed(kind: type[AnyModel], raw: bytes) -> AnyModel:
    """Parse a body that ignores unknown fields. Raises ApiError."""
    try:
        return kind.model_validate(from_json(raw, allow_inf_nan=False))
    except ValidationError as error:
        raise invalid(error) from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error


def event_stream(events: bytes) -> Response:
    """Answer with all events at once, since the whole answer is there."""
    return Response(events, media_type="text/event-stream")


# vLLM's /inference/v1/generate: token ids in, token ids and log-probs out

FIELDS = CompletionBody.model_fields.keys() - {"model", "prompt", "echo", "stream", "stream_options", "logprobs"}
"""Names in `sampling_params` that mean here what they mean in a request for completions. Others are ignored, since
clients send all of vLLM's."""


class GenerateBody(Body):
    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    token_ids: Items[TokenId]
    sampling_params: dict[str, Any] = {}
    stream: bool = False

    def completion(self) -> CompletionBody:
        """Return the same request for completions. Raises ApiError, and pydantic's ValidationError."""
        if self.stream:
            raise unsupported("stream")
        if self.sampling_params.get("structured_outputs"):
            raise unsupported("structured_outputs", ADVICE["structured_outputs"])
        if not self.token_ids:
            raise ApiError(400, "token_ids: is empty: there is nothing to answer", param="token_ids")
        params = {name: value for name, value in self.sampling_params.items() if name in FIELDS}
        return CompletionBody(model=self.model, prompt=self.token_ids, logprobs=0, **params)


class GenerateFormat(ChoiceFormat):
    def head(self, streamed: bool) -> dict[str, Any]:
        return {"request_id": self.id, "created": self.created, "model": self.model}

    def whole(self, index: int, part: AnswerPart, prompt: Prompt) -> dict[str, Any]:
        return {
            "index": index,
            "token_ids": part.tokens,
            "logprobs": {
                "content": [
                    {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                    for token, logprob in zip(part.tokens, part.logprobs, strict=True)
                ]
            },
            "finish_reason": part.finish_reason,
            "policy_versions": part.versions,
        }
