"""Messages and tools in request bodies, including fields that clients copy from answers of other servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list of which only the first wrong item is reported: a body has room for millions."""
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
        known = {name: said[name] for name in cls.model_fields.keys() & said.keys()}
        unknown = next((name for name in said if name not in known), None)
        return known if unknown is None else known | {unknown: said[unknown]}


class TextPart(Body):
    type: Literal["text"]
    text: str
    annotations: Any = None
    cache_control: Any = None


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] = ""
    """A JSON object; some clients send nothing for a function without parameters."""


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Index of a streamed call, which some clients send back."""
    cache_control: Any = None
    provider_specific_fields: Any = None


class Message(Body):
    """A message of a conversation, also as clients send back an answer of this server or another one."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Objects[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's name for reasoning_content."""
    tool_calls: Objects[ToolCall] | None = None
    tool_call_id: str | None = None
    annotations: Any = None
    cache_control: Any = None
    provider_specific_fields: Any = None
    reasoning_details: Any = None
    refusal: str | None = None
    thinking_blocks: Any = None


class Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: Annotated[bool | None, Field(exclude=True)] = None
    """Without effect, as in vLLM when the model chooses whether to call: arguments may violate the schema."""


class Tool(Body):
    type: Literal["function"]
    function: Function
    cache_control: Annotated[Any, Field(exclude=True)] = None
