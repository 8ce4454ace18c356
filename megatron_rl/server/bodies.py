"""What the bodies of requests may say. A parameter that this server cannot honour is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from megatron_rl.inference.api import MOST_TOP_LOGPROBS
from megatron_rl.inference.config import Sampling
from megatron_rl.server.errors import ApiError, invalid, unsupported

MOST_CHOICES = 128
"""Answers to one request."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
"""Parameters that the server cannot honour, and their values that ask for nothing."""

SAYS_NOTHING = {
    "metadata",  # the client's own notes
    "prompt_cache_key",  # where OpenAI looks for the beginning of a prompt: here it is found without
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",  # who asks, as does the next one
    "user",
}
"""Parameters that change no answer."""

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong item is the only one that is told: a body has room for millions."""
MOST_OBJECTS = 10_000
Objects = Annotated[list[Item], Field(max_length=MOST_OBJECTS, fail_fast=True)]
"""Of what costs more to read than a number or a string; meanwhile nobody else is answered."""

TokenId = Annotated[int, Field(ge=0)]
AnyBody = TypeVar("AnyBody", bound="Body")


class Body(BaseModel):
    """null is what is left out: the default. Of unknown names one is told."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        said = {name: value for name, value in given.items() if value is not None}
        known = {name: said[name] for name in cls.model_fields.keys() & said.keys()}
        unknown = next((name for name in said if name not in known), None)
        return known if unknown is None else known | {unknown: said[unknown]}


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False

    @field_validator("include_obfuscation")
    @classmethod
    def _never(cls, value: bool) -> bool:
        if value:
            raise ValueError("is not supported here; leave it out")
        return value


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Items[str] = []
    stop_token_ids: Items[TokenId] = []
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    """Whether each choice has `prompt_token_ids`, `token_ids` and `policy_versions`."""

    @property
    def answer_limit(self) -> int | None:
        """Tokens of an answer, where the request says how many."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are told of each place beside the sampled one; None: no log-probs at all."""
        raise NotImplementedError

    def sampling(self, max_new_tokens: int) -> Sampling:
        """Raises ApiError."""
        if self.min_tokens > max_new_tokens > 0:
            message = f"min_tokens {self.min_tokens} is more than the {max_new_tokens} that an answer may have"
            raise ApiError(400, message, param="min_tokens", code="invalid_value")
        try:
            return Sampling(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                max_new_tokens=max_new_tokens,
                min_new_tokens=self.min_tokens,
                stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
                stop_tokens=tuple(self.stop_token_ids),
            )
        except ValidationError as error:
            names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_tokens": "stop_token_ids"}
            raise invalid(error, names) from error


class CompletionBody(GenerationBody):
    prompt: str | Items[TokenId] | Items[str] | Items[Items[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


class TextPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One of a conversation, also as a client sends back what it was answered."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Objects[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: Objects[ToolCall] | None = None
    tool_call_id: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] = []

    @property
    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: Literal[False] | None = None
    """An answer that fits the schema is not promised."""


class Tool(Body):
    type: Literal["function"]
    function: Function


class ChatBody(GenerationBody):
    messages: Objects[Message] = []
    prompt_token_ids: Items[TokenId] = []
    """The prompt in place of what the template makes of the messages."""
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] = 0
    tools: Objects[Tool] = []
    tool_choice: str | dict[str, Any] = "auto"

    @property
    def answer_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Objects[Message] = []
    tools: Objects[Tool] = []


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Items[TokenId]


class UpdateBody(Body):
    version: Annotated[int, Field(ge=0)]


def parse(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """A request's body. Raises ApiError."""
    try:
        content = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise ApiError(400, "the body is no JSON object", code="invalid_json")
    given = {name: value for name, value in content.items() if value is not None and name not in SAYS_NOTHING}
    for name in NEUTRAL.keys() & given.keys():
        neutral = given.pop(name)
        if neutral not in NEUTRAL[name] and not (name == "best_of" and neutral == given.get("n")):
            raise unsupported(name)
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        raise invalid(error) from error
    if isinstance(body, ChatBody):
        _check_chat(body)
    return body


def _check_chat(body: ChatBody) -> None:
    if not body.messages and not body.prompt_token_ids:
        raise ApiError(400, "messages: there are none", param="messages", code="invalid_value")
    if body.tool_choice not in ("none", "auto"):
        raise unsupported("tool_choice", "other than none and auto is not supported here: no call can be forced")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise ApiError(400, "max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
