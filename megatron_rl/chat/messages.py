"""Messages of a conversation, as in OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

Message = dict[str, Any]
"""A message in OpenAI's form: the arguments of its tool calls are JSON text, or already an object."""


def new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One function call that the model requests."""

    name: str
    arguments: str
    """A JSON object."""
    id: str = field(default_factory=new_call_id, compare=False)

    @property
    def message(self) -> dict[str, Any]:
        """The call as a message contains it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer of the model, divided."""

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> Message:
        """The answer as a message of the conversation."""
        found: Message = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            found["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            found["tool_calls"] = [call.message for call in self.tool_calls]
        return found


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages as chat templates read them: text as one string, arguments of calls as objects, no field
    without a value.

    Raises ValueError for content other than text, and for arguments that are not JSON.
    """
    return [_for_template(message) for message in messages]


def _for_template(message: Mapping[str, Any]) -> Message:
    role = message["role"]
    found: Message = {"role": "system" if role == "developer" else role, "content": text_of(message.get("content"))}
    thought = message.get("reasoning_content")
    thought = message.get("reasoning") if thought is None else thought  # vLLM's name
    for name, value in (
        ("name", message.get("name")),
        ("tool_call_id", message.get("tool_call_id")),
        ("reasoning_content", thought),
    ):
        if value is not None:
            found[name] = value
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call_for_template(call) for call in calls]
    return found


def text_of(content: Any) -> str:
    """Return the text of a message's content: a string, or a list of parts. Raises ValueError."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("content: a part is no text; the model reads text only")
    return "".join(map(str, texts))


def _call_for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tool_calls: arguments are not JSON: {error}") from error
    identity = {"id": call["id"]} if call.get("id") is not None else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
