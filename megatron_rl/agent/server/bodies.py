"""Request bodies. This server acts on all of their fields; parameters.py has the parameters on which it does not."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from megatron_rl.agent.server.parameters import ADVICE, asks_nothing
from megatron_rl.generate.engine.interface import MOST_TOP_LOGPROBS
from megatron_rl.generate.serving.api_errors import ApiError, invalid, invalid_conversation, unsupported
from megatron_rl.model.chat.answer_form import AnswerForm
from megatron_rl.model.chat.conversation import Conversation, ConversationError, conversation_of
from megatron_rl.recipe.inference import Sampling, ServedSampling

MOST_CHOICES = 128
CHANGE_LOGITS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
"""Parameters with which answers would be of another distribution than the policy's."""

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list. Only its first wrong item is reported, since a body has room for millions."""
MOST_OBJECTS = 10_000
Objects = Annotated[list[Item], Field(max_length=MOST_OBJECTS, fail_fast=True)]
"""A list of items that take longer to parse than a number or a string; parsing blocks all other requests."""

TokenId = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """Base of all bodies. null means left out. Only one unknown name is reported."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        said = {name: value for name, value in given.items() if value is not None}
        names = {field.alias or name for name, field in cls.model_fields.items()}
        known = {name: said[name] for name in names & said.keys()}
        unknown = next((name for name in said if name not in known), None)
        return known if unknown is None else known | {unknown: said[unknown]}


AnyBody = TypeVar("AnyBody", bound=Body)


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
    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens, and so does -1, as in vLLM."""
    min_p: float = 0.0
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Items[str] = []
    stop_token_ids: Items[TokenId] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    skip_special_tokens: bool = True
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    """Whether each choice includes `prompt_token_ids`, `token_ids` and `policy_versions`."""

    @property
    def answer_limit(self) -> int | None:
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """Number of the likeliest tokens to return at each position, besides the sampled one; None: no log-probs."""
        raise NotImplementedError

    @property
    def scores(self) -> int | None:
        """Likewise, at each position of the prompt."""
        return None

    def refuse_other_logits(self) -> None:
        """Raise ApiError if the request changes the policy's logits. A run's endpoint ignores that, unless programs
        choose the sampling."""
        for name in CHANGE_LOGITS:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise unsupported(name, "is not supported here; leave it out, or serve the weights with vLLM")

    def sampling(self, max_new_tokens: int) -> Sampling:
        if self.min_tokens > max_new_tokens > 0:
            message = f"min_tokens {self.min_tokens} exceeds the {max_new_tokens} tokens that an answer may have"
            raise ApiError(400, message, param="min_tokens", code="invalid_value")
        try:
            values: dict[str, Any] = {
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": max(0, self.top_k) if self.top_k >= -1 else self.top_k,
                "min_p": self.min_p,
                "max_new_tokens": max_new_tokens,
                "min_new_tokens": self.min_tokens,
                "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
                "stop_tokens": tuple(self.stop_token_ids),
            }
            return ServedSampling(**values, ignore_eos=True) if self.ignore_eos else Sampling(**values)
        except ValidationError as error:
            names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_tokens": "stop_token_ids"}
            raise invalid(error, names) from error


class CompletionBody(GenerationBody):
    prompt: str | Items[TokenId] | Items[str] | Items[Items[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    echo: bool = False
    add_special_tokens: bool = True
    """Whether to start a text as the tokenizer starts any text, with BOS if it has one."""

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def scores(self) -> int | None:
        return max(
            (each for each in (self.prompt_logprobs, self.logprobs if self.echo else None) if each is not None),
            default=None,
        )


class JsonSchema(Body):
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field({}, alias="schema")
    strict: bool = False
    """Whether a keyword that cannot be enforced is refused, instead of being ignored."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema belongs to the type json_schema, which needs it")
        return self


class ChatBody(GenerationBody):
    messages: Objects[Any] = []
    prompt_token_ids: Items[TokenId] = []
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] = 0
    tools: Objects[Any] = []
    tool_choice: str | dict[str, Any] = "auto"
    response_format: ResponseFormat = ResponseFormat(type="text")
    parallel_tool_calls: bool = True
    """false: only the first call of an answer is returned."""
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """A variable of the chat template, by vLLM's rule: any but none also sets `enable_thinking`."""
    add_special_tokens: bool = False
    """Whether to start the prompt as the tokenizer starts any text; most chat templates do so themselves."""

    @cached_property
    def said(self) -> Conversation:
        return conversation_of(self.messages, None if self.tool_choice == "none" else self.tools)

    @cached_property
    def form(self) -> AnswerForm | None:
        """Form into which the answer is forced; None: it is free."""
        tools = self.said.tools
        if self.tool_choice not in ("none", "auto"):
            name = named_tool(self.tool_choice)
            return AnswerForm(tools=[tool for tool in tools if name in (None, tool["function"]["name"])])
        if self.response_format.type == "text":
            return None
        given = self.response_format.json_schema
        return AnswerForm({"type": "object"} if given is None else given.schema_, tools, bool(given and given.strict))

    @property
    def variables(self) -> dict[str, Any]:
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        thinks = self.reasoning_effort != "none"
        return {"reasoning_effort": self.reasoning_effort, "enable_thinking": thinks} | self.chat_template_kwargs

    @property
    def answer_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


def parse(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """Parse a request body. Raises ApiError."""
    try:
        content = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    given = {
        name: value
        for name, value in content.items()
        if name in kind.model_fields or not asks_nothing(name, value, content)
    }
    if advised := next((name for name in ADVICE if name in given and name not in kind.model_fields), None):
        raise unsupported(advised, ADVICE[advised])
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        raise invalid(error) from error
    if isinstance(body, ChatBody):
        check_said(body)
        _check_chat(body)
    if isinstance(body, CompletionBody) and body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "needs a whole answer; leave out stream")
    return body


def check_said(body: ChatBody) -> None:
    """Raise ApiError if the messages or tools cannot be understood."""
    try:
        _ = body.said
    except ConversationError as error:
        raise invalid_conversation(error) from error


def check_tool_choice(choice: str | dict[str, Any], names: Collection[str]) -> None:
    """Raise ApiError unless the choice is one that OpenAI knows, of the tools with these names."""
    if choice in ("none", "auto"):
        return
    name = named_tool(choice)
    if choice != "required" and name is None:
        raise unsupported("tool_choice", "other than none, auto, required and a function's name is not supported here")
    if not names or (name is not None and name not in names):
        missing = "tools, but there are none" if name is None else f"a tool {str(name)[:64]!r}, but there is none"
        raise ApiError(400, f"tool_choice asks for {missing}", param="tool_choice", code="invalid_value")


def named_tool(choice: str | dict[str, Any]) -> str | None:
    """Return the name of the tool that a `tool_choice` asks for; None if it names none."""
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    return named.get("name") if isinstance(named, dict) else None


def _check_chat(body: ChatBody) -> None:
    if not body.messages and not body.prompt_token_ids:
        raise ApiError(400, "messages: must not be empty", param="messages", code="invalid_value")
    check_tool_choice(body.tool_choice, [tool["function"]["name"] for tool in body.said.tools])
    for name in ("min_tokens", "ignore_eos"):
        if body.form is not None and getattr(body, name):
            raise ApiError(400, f"{name}: an answer in a given form ends where the form does", param=name)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise ApiError(400, "max_tokens and max_completion_tokens differ: give only one of them", param="max_tokens")
