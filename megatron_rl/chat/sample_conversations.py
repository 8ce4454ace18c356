"""Conversations that stand for all of their form: their texts are words that occur nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_rl.chat.messages import Conversation, Message


def form_of(said: Conversation) -> tuple[Any, ...]:
    """Return what decides, besides the texts, which parts a template writes."""
    return (
        len(said.tools),
        said.learned,
        *(
            (
                message["role"],
                bool(message["content"].strip()),
                "reasoning_content" in message,
                "name" in message,
                tuple(
                    (len(call["function"]["arguments"]), call["function"]["name"] in call.get("id", ""))
                    for call in message.get("tool_calls", ())
                ),
            )
            for message in said.messages
        ),
    )


def sample_of(said: Conversation) -> Conversation:
    """Return a conversation of the same form, whose texts are words that occur nowhere else."""
    count = 0

    def word() -> str:
        nonlocal count
        count += 1
        return f"zq{count}qz"

    names: dict[str, str] = {}
    tools = []
    for _ in said.tools:
        schema = {"type": "object", "properties": {word(): {"type": "string", "description": word()}}}
        function = {"name": word(), "description": word(), "parameters": schema}  # a call of the tool has another name
        tools.append({"type": "function", "function": function})
    messages = []
    for message in said.messages:
        found = {**message, "content": word() if message["content"].strip() else message["content"]}
        if "reasoning_content" in message:
            found["reasoning_content"] = word()
        if "name" in message:
            found["name"] = names.setdefault(message["name"], word())
            if "tool_call_id" in message:
                found["tool_call_id"] = message["tool_call_id"].replace(message["name"], found["name"])
        if "tool_calls" in message:
            found["tool_calls"] = [_sample_call(call, names, word) for call in message["tool_calls"]]
        messages.append(found)
    return Conversation(tuple(messages), tuple(tools), said.learned, said.places)


def _sample_call(call: Message, names: dict[str, str], word: Callable[[], str]) -> Message:
    """Return a call of the same form. Some ids have the name of the function, and a template may write the id alone."""
    real = call["function"]["name"]
    name = names.setdefault(real, word())
    function = {"name": name, "arguments": {word(): word() for _ in call["function"]["arguments"]}}
    ids = {"id": call["id"].replace(real, name)} if "id" in call else {}
    return {**ids, "type": "function", "function": function}
