"""Translation of a request body to requests of an engine: model, prompts in tokens, limits."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from megatron_rl.agent.server.bodies import MOST_CHOICES, ChatBody, CompletionBody, GenerationBody
from megatron_rl.agent.server.response_bodies import ChatFormat, ChoiceFormat, CompletionFormat
from megatron_rl.agent.server.samples import Prompt, Reading, TokenNames
from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.generate.serving.api_errors import MOST_SAID, ApiError, context_exceeded, invalid_conversation
from megatron_rl.model.chat.answer_form import AnswerForm, NoForm, grammar_of
from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.chat.conversation import Conversation, ConversationError
from megatron_rl.model.grammar import GrammarError, Grammars, NoGrammars

COMPLETION_TOKENS = 16
LONG_TEXT = 20_000
"""Characters from which on text is encoded in another thread, so that other requests need not wait."""
_KEYS = 2**64
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    prompts: list[Prompt]
    body: GenerationBody
    form: ChoiceFormat
    reading: Reading
    requests: list[GenerationRequest]


class ServedModel:
    """The model as clients see it. It detects every fault of a request before the engine is asked."""

    def __init__(self, name: str, chat: Chat, max_length: int) -> None:
        self.name, self.tokenizer, self.max_length = name, chat.tokenizer, max_length
        self._chat = chat
        self._grammars = Grammars(self.tokenizer)
        self._names = TokenNames(self.tokenizer)
        self.card: dict[str, Any] = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "mrl"}

    def check_model(self, model: str | None) -> None:
        if model not in (None, self.name):
            raise ApiError(
                404,
                f"there is no model {str(model)[:200]!r} here: this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    async def completion(self, body: CompletionBody) -> ParsedRequest:
        prompts = await self._prompts(body)
        reading = replace(_reading(body), continues_prompt=True, drops_answer=body.echo and body.max_tokens == 0)
        return self._asked(body, prompts, self._form(CompletionFormat, body), reading, COMPLETION_TOKENS, "prompt")

    async def chat(self, body: ChatBody) -> ParsedRequest:
        tools = body.said.tools
        chat = await self._chat_of(body.variables)
        if tools and not chat.has_tools:
            raise ApiError(
                400,
                "tools: the chat template of this model has no tools, or writes calls in an unknown format",
                param="tools",
                code="unsupported_parameter",
            )
        if body.prompt_token_ids:
            prompt, param = body.prompt_token_ids, "prompt_token_ids"
        else:
            text = _rendered(chat, body.said)
            prompt, param = await self._encode(text, "messages", begins=body.add_special_tokens), "messages"
        undivided = not body.skip_special_tokens and not tools  # the names of control tokens are asked for
        reading = replace(
            _reading(body),
            chat=None if undivided else chat,
            tools=tools,
            parallel_calls=body.parallel_tool_calls,
            reasoning=body.include_reasoning,
        )
        asked = self._asked(body, [Prompt(prompt)], self._form(ChatFormat, body), reading, None, param)
        if body.form is None:
            return asked
        grammar = await asyncio.to_thread(self._grammar, chat, body.form, prompt)  # compiling it may take a while
        return replace(asked, requests=[replace(each, grammar=grammar) for each in asked.requests])

    def _grammar(self, chat: Chat, form: AnswerForm, prompt: list[int]) -> str:
        """Return the grammar of an answer in this form. Raises ApiError if the answer cannot have it."""
        param = "tool_choice" if form.schema is None else "response_format"
        try:
            grammar = grammar_of(form, chat, prompt)
            self._grammars.check(grammar)
        except (NoForm, GrammarError, NoGrammars) as error:
            code = "invalid_value" if isinstance(error, GrammarError) else "unsupported_parameter"
            raise ApiError(400, f"{param}: {error}", param=param, code=code) from error
        return grammar

    async def _chat_of(self, variables: Mapping[str, Any]) -> Chat:
        """Return the chat with these template variables. Checking new ones takes a while, so a thread does it."""
        return await asyncio.to_thread(self._chat.with_variables(variables).check) if variables else self._chat

    def _form(self, kind: type[ChoiceFormat], body: GenerationBody) -> ChoiceFormat:
        scores = body.prompt_logprobs if isinstance(body, CompletionBody) else None
        return kind(self.name, self._names, body.likeliest, body.return_token_ids, scores)

    async def _prompts(self, body: CompletionBody) -> list[Prompt]:
        prompt = body.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [await self._prompt(prompt, body)]
        if len(prompt) * body.n > MOST_CHOICES:  # check before encoding: a body has room for millions
            raise ApiError(
                400, f"n: {len(prompt)} prompts with {body.n} answers each exceed {MOST_CHOICES} answers", param="n"
            )
        many = cast(list[str] | list[list[int]], prompt)
        return [await self._prompt(one, body) for one in many]

    async def _prompt(self, given: str | list[int], body: CompletionBody) -> Prompt:
        if isinstance(given, str):
            tokens = await self._encode(given, "prompt", begins=body.add_special_tokens)
            return Prompt(tokens, given if body.echo else "")
        self.check_tokens(given, "prompt")
        text = self.tokenizer.decode(given, special=not body.skip_special_tokens) if body.echo else ""
        return Prompt(given, text)

    async def _encode(self, text: str, param: str, *, begins: bool) -> list[int]:
        """begins: whether to add the tokens with which the tokenizer begins a text, such as BOS."""
        encode = self.tokenizer.encode_prompt if begins else self.tokenizer.encode
        try:
            if len(text) > LONG_TEXT:
                return await asyncio.to_thread(encode, text)
            return encode(text)
        except ValueError as error:
            raise ApiError(400, f"{param}: {str(error)[:MOST_SAID]}", param=param, code="invalid_value") from error

    def _asked(
        self,
        body: GenerationBody,
        prompts: list[Prompt],
        form: ChoiceFormat,
        reading: Reading,
        answer_default: int | None,
        param: str,
    ) -> ParsedRequest:
        if not prompts or not all(prompt.tokens for prompt in prompts):
            raise ApiError(400, f"{param}: is empty: there is nothing to answer", param=param, code="invalid_value")
        for prompt in prompts:
            self.check_tokens(prompt.tokens, param)
        self.check_tokens(body.stop_token_ids, "stop_token_ids")
        key = secrets.randbits(64) if body.seed is None else body.seed % 2**64
        requests = []
        for number, prompt in enumerate(prompts):
            room = self.max_length - len(prompt.tokens)
            wanted = 1 if reading.drops_answer else body.answer_limit
            if wanted is None:
                wanted = min(answer_default or room, room)
            if room < 1 or wanted > room:
                raise context_exceeded(len(prompt.tokens), max(wanted, 1), self.max_length, param)
            sampling = body.sampling(wanted)
            requests.append(
                GenerationRequest(
                    prompt.tokens,
                    body.n,
                    sampling,
                    (key + number * _GOLDEN) % _KEYS,
                    top_logprobs=body.likeliest or 0,
                    prompt_logprobs=body.scores,
                )
            )
        return ParsedRequest(prompts, body, form, reading, requests)

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        if tokens and max(tokens) >= self.tokenizer.vocab_size:
            raise ApiError(
                400,
                f"{param}: {max(tokens)} is not a token; tokens are 0 to {self.tokenizer.vocab_size - 1}",
                param=param,
                code="invalid_value",
            )


def _rendered(chat: Chat, said: Conversation) -> str:
    if not chat.has_template:
        raise no_template()
    try:
        return chat.text(said)
    except ConversationError as error:
        raise invalid_conversation(error) from error
    except ValueError as error:
        param = "chat_template_kwargs" if "variable of a chat template" in str(error) else "messages"
        raise ApiError(400, f"{param}: {str(error)[:MOST_SAID]}", param=param, code="invalid_value") from error


def no_template() -> ApiError:
    return ApiError(
        400,
        "messages: this model has no chat template; use /v1/completions, or give prompt_token_ids",
        param="messages",
        code="no_chat_template",
    )


def _reading(body: GenerationBody) -> Reading:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    return Reading(stop, tuple(body.stop_token_ids), body.include_stop_str_in_output, not body.skip_special_tokens)
