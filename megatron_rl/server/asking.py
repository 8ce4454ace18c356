"""From the body of a request to what the engine is asked: its model, its prompts in tokens, its limits."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from pydantic_core import from_json

from megatron_rl.agent.tool_calls import CallReader, reader_for
from megatron_rl.inference.api import GenerationRequest
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.server.answers import ChatFormat, CompletionFormat, Format
from megatron_rl.server.bodies import (
    MOST_CHOICES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    Message,
    TokenizeBody,
    Tool,
)
from megatron_rl.server.errors import ApiError, context_exceeded

COMPLETION_TOKENS = 16
"""Of an answer to /v1/completions that says nothing else: OpenAI's."""
LONG_TEXT = 20_000
"""Characters from which on text is encoded in another thread, not to keep the others waiting."""
MOST_SAID = 500
"""Characters of what is wrong with a text, which may be repeated in it."""
_KEYS = 2**64
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Asked:
    """What one HTTP request comes to."""

    prompts: list[list[int]]
    body: GenerationBody
    form: Format
    reader: type[CallReader] | None
    requests: list[GenerationRequest]
    """One a prompt."""


class ServedModel:
    """The model as clients see it: all that can be wrong with a request is found here, before the engine is asked."""

    def __init__(self, name: str, tokenizer: Tokenizer, max_length: int) -> None:
        """max_length: of a prompt and its answer together, in tokens."""
        self.name, self.tokenizer, self.max_length = name, tokenizer, max_length
        self._show = cache(tokenizer.show)

    def check_model(self, model: str | None) -> None:
        """Raises ApiError where it is not the one that there is."""
        if model not in (None, self.name):
            raise ApiError(
                404,
                f"there is no model {model[:200]!r} here: it is {self.name!r}",
                param="model",
                code="model_not_found",
            )

    async def completion(self, body: CompletionBody) -> Asked:
        """Raises ApiError."""
        self.check_model(body.model)
        prompts = await self._prompts(body)
        form = CompletionFormat(self.name, self._show, body.likeliest, body.return_token_ids)
        return self._asked(body, prompts, form, None, COMPLETION_TOKENS, "prompt")

    async def chat(self, body: ChatBody) -> Asked:
        """Raises ApiError."""
        self.check_model(body.model)
        tools = body.tools if body.tool_choice != "none" else []
        reader = self._reader() if tools else None
        if body.prompt_token_ids:
            prompt = body.prompt_token_ids
        else:
            prompt = await self._encode(self.chat_text(body.messages, tools), "messages")
        form = ChatFormat(self.name, self._show, body.likeliest, body.return_token_ids)
        param = "prompt_token_ids" if body.prompt_token_ids else "messages"
        return self._asked(body, [prompt], form, reader, None, param)

    def _reader(self) -> type[CallReader]:
        reader = reader_for(self.tokenizer.chat_template or "")
        if reader is None:
            raise ApiError(
                400,
                "tools: the chat template of this model has none, or has them called in a way that is not known here",
                param="tools",
                code="unsupported_parameter",
            )
        return reader

    def chat_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """The prompt that the model's template makes of a conversation. Raises ApiError."""
        try:
            text = self.tokenizer.conversation(
                [_for_template(message) for message in messages],
                [tool.model_dump(exclude_none=True) for tool in tools] or None,
            )
        except ValueError as error:
            raise ApiError(400, f"messages: {error}", param="messages", code="invalid_value") from error
        if text is None:
            raise ApiError(
                400,
                "messages: this model has no chat template; ask /v1/completions, or give prompt_token_ids",
                param="messages",
                code="no_chat_template",
            )
        return text

    async def _prompts(self, body: CompletionBody) -> list[list[int]]:
        prompt = body.prompt
        if isinstance(prompt, str):
            return [await self._encode(prompt, "prompt")]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        if len(prompt) * body.n > MOST_CHOICES:  # before they are encoded: a body has room for millions
            raise ApiError(
                400, f"n: {len(prompt)} prompts of {body.n} answers each are more than {MOST_CHOICES}", param="n"
            )
        many = cast(list[str] | list[list[int]], prompt)
        return [await self._encode(one, "prompt") if isinstance(one, str) else one for one in many]

    async def _encode(self, text: str, param: str) -> list[int]:
        try:
            if len(text) > LONG_TEXT:
                return await asyncio.to_thread(self.tokenizer.encode, text)
            return self.tokenizer.encode(text)
        except ValueError as error:
            raise ApiError(400, f"{param}: {str(error)[:MOST_SAID]}", param=param, code="invalid_value") from error

    def _asked(
        self,
        body: GenerationBody,
        prompts: list[list[int]],
        form: Format,
        reader: type[CallReader] | None,
        answer_default: int | None,
        param: str,
    ) -> Asked:
        if not prompts or not all(prompts):
            raise ApiError(400, f"{param}: is empty; there is nothing to answer", param=param, code="invalid_value")
        for name, tokens in [*((param, prompt) for prompt in prompts), ("stop_token_ids", body.stop_token_ids)]:
            self.check_tokens(tokens, name)
        key = secrets.randbits(64) if body.seed is None else body.seed % 2**64
        requests = []
        for number, prompt in enumerate(prompts):
            room = self.max_length - len(prompt)
            wanted = body.answer_limit
            if wanted is None:
                wanted = min(answer_default or room, room)
            if room < 1 or wanted > room:
                raise context_exceeded(len(prompt), max(wanted, 1), self.max_length, param)
            sampling = body.sampling(wanted)
            requests.append(
                GenerationRequest(
                    prompt, body.n, sampling, (key + number * _GOLDEN) % _KEYS, top_logprobs=body.likeliest or 0
                )
            )
        return Asked(prompts, body, form, reader, requests)

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises ApiError where one is outside the vocabulary."""
        if tokens and max(tokens) >= self.tokenizer.vocab_size:
            raise ApiError(
                400,
                f"{param}: {max(tokens)} is no token: they are 0 to {self.tokenizer.vocab_size - 1}",
                param=param,
                code="invalid_value",
            )

    async def tokenize(self, body: TokenizeBody) -> list[int]:
        """Raises ApiError."""
        self.check_model(body.model)
        if (body.prompt is None) == (not body.messages):
            raise ApiError(400, "prompt: give this or messages", param="prompt", code="invalid_value")
        if body.prompt is not None:
            return await self._encode(body.prompt, "prompt")
        return await self._encode(self.chat_text(body.messages, body.tools), "messages")

    def detokenize(self, body: DetokenizeBody) -> str:
        """Raises ApiError."""
        self.check_model(body.model)
        self.check_tokens(body.tokens, "tokens")
        return self.tokenizer.decode(body.tokens)


def _for_template(message: Message) -> dict[str, Any]:
    """A message as chat templates know it: text as one string, arguments of calls as objects."""
    found: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
    }
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return found


def _arguments(text: str) -> Any:
    try:
        return from_json(text)
    except ValueError as error:
        raise ApiError(400, f"tool_calls: arguments are no JSON: {error}", param="messages") from error
