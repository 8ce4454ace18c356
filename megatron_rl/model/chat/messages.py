"""Messages of a conversation, as in OpenAI's API and as chat templates read them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from uuid import uuid4

Message = dict[str, Any]
"""A message in OpenAI's form. Within a `Conversation` its content is one text, the arguments of its calls are objects,
and it has no field without a value."""
Tool = dict[str, Any]
"""The definition of a tool: {"type": "function", "function": {"name", "description", "parameters"}}."""


THINK, THINK_END = "<think>", "</think>"
"""Tags of a thought within a text, at which many templates cut an earlier answer."""


class ConversationError(ValueError):
    def __init__(self, field: str, reason: str) -> None:
        """field: place of the fault, such as messages.2.tool_calls.0.function.arguments."""
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the one form that chat templates read. `conversation_of` makes it."""

    messages: tuple[Message, ...]
    """Roles system, user, assistant and tool; content as text; reasoning_content; tool_calls with objects as arguments;
    tool_call_id; name."""
    tools: tuple[Tool, ...] = ()
    learned: tuple[bool, ...] = ()
    """[messages] whether a message of the assistant is learned; False for other roles."""
    places: tuple[str, ...] = ()  # [messages] where each message stands in what was given, such as messages.2.

    def __add__(self, other: Conversation) -> Conversation:
        return Conversation(
            self.messages + other.messages,
            self.tools + tuple(tool for tool in other.tools if tool not in self.tools),
            self.learned + other.learned,
            self.places + other.places,
        )

    def __getitem__(self, part: slice) -> Conversation:
        return Conversation(self.messages[part], self.tools, self.learned[part], self.places[part])

    def as_context(self) -> Conversation:
        return replace(self, learned=(False,) * len(self.messages))


def new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # A JSON object
    id: str = field(default_factory=new_call_id, compare=False)

    @property
    def message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> Message:
        found: Message = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            found["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            found["tool_calls"] = [call.message for call in self.tool_calls]
        return found


class Example(NamedTuple):
    tokens: list[int]
    loss_mask: list[bool]
    """[tokens] whether the model would sample the token: a part of an answer, or the token that ends it."""
