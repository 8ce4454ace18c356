"""The one schema of conversations: requests, rows, prompts and messages of programs pass it.

    conversation_of([{"role": "user", "content": "hi"}])
    conversation_of([{"from": "human", "value": "hi"}], tools='[{"name": "add", "parameters": {...}}]')

It understands the forms in which data sets are published. Anything else is refused by the place where it stands, since
a field that nobody reads is a part of the lesson that vanishes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.model.chat.content_parts import ContentPart, pieces_of, thought_of
from megatron_rl.model.chat.messages import Conversation, ConversationError, Message
from megatron_rl.model.chat.tool_forms import call_of, calls_of, items_of, kind_of, parsed_json, said, tools_of

__all__ = ["Conversation", "ConversationError", "conversation_of"]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""Names of roles in published sets, and the four that chat templates know. The text of a function_call is a call."""
ADVICE = {
    "tools": "definitions of tools stand beside the messages (`tools`), and the result of a call has the role tool",
}
"""Advice about roles that several sets use for different things."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of a message's thought: DeepSeek's and vLLM's, OpenRouter's, and gpt-oss's."""
WITHOUT_MEANING = {
    "annotations": "sources of a text that are not part of it",
    "cache_control": "advice to a cache",
    "created_at": "a date of the record",
    "finish_reason": "how another server ended the answer",
    "id": "a number of the record",
    "index": "a number of the record",
    "language": "a note about the text",
    "logprobs": "numbers of another sampler",
    "message_id": "a number of the record",
    "metadata": "notes about the message",
    "model": "who wrote the answer",
    "provider_specific_fields": "notes of another provider",
    "source": "where the text was found",
    "status": "how another server ended the answer",
    "stop_reason": "how another server ended the answer",
    "timestamp": "a date of the record",
    "turn": "a number of the record",
    "turn_id": "a number of the record",
    "usage": "costs of another server",
}
"""Keys of a message that are ignored, since they do not change what is said. Key -> reason."""


def conversation_of(messages: object, tools: object = None, *, field: str = "messages") -> Conversation:
    """Return a conversation in the form that chat templates read.

    Args:
        messages: a list of messages, or its JSON text.
        tools: the definitions of tools, or their JSON text.
        field: name of the messages, for errors.

    Raises ConversationError.
    """
    if isinstance(messages, str):
        messages = parsed_json(messages, field)
    found: list[Message] = []
    learned: list[bool] = []
    places: list[str] = []
    for number, given in enumerate(items_of(messages, field, "messages")):
        place = f"{field}.{number}"
        for message, is_learned in _messages(given, place):
            found.append(message)
            learned.append(is_learned)
            places.append(place)
    _link_results(found)
    return Conversation(tuple(found), tools_of(tools), tuple(learned), tuple(places))


def _messages(given: object, place: str) -> list[tuple[Message, bool]]:
    """Return a message, and whether it is learned; the results of calls in its parts become messages."""
    if not isinstance(given, Mapping):
        raise ConversationError(place, f"is {kind_of(given)}, not a message with a role and a content")
    fields = {name: value for name, value in said(given).items() if name not in WITHOUT_MEANING}
    name, key = _one_of(fields, ("role", "from"), place)
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        what = "is missing" if key is None else f"is {name!r}" if isinstance(name, str) else f"is {kind_of(name)}"
        advice = ADVICE.get(str(name), f"known are {', '.join(ROLES)}")
        raise ConversationError(f"{place}.{key or 'role'}", f"{what}; {advice}")
    content, key = _one_of(fields, ("content", "value"), place)
    inside = f"{place}.{key or 'content'}"
    learned = _learned(fields, role, place)
    message: Message = {"role": role, "content": ""}
    if name == "function_call":
        message["tool_calls"] = _calls_in(content, inside)
        pieces: list[ContentPart] = []
    else:
        if content is None and role in ("user", "system"):
            raise ConversationError(inside, "is missing or null; a message without a content says nothing")
        pieces = pieces_of(content, role, inside)
    for each in ("name", "tool_call_id"):
        if each in fields:
            message[each] = fields.pop(each)
            if not isinstance(message[each], str):
                raise ConversationError(f"{place}.{each}", f"is {kind_of(message[each])}, not a text")
    if role == "assistant":
        _add_answer(message, fields, pieces, place)
    for unknown, value in fields.items():
        if value not in ("", [], {}):
            raise ConversationError(f"{place}.{unknown}", "is not known here for this role; leave it out")
    return [(each, learned) for each in _spread(message, pieces)]


def _one_of(fields: dict[str, Any], names: Sequence[str], place: str) -> tuple[Any, str | None]:
    """Remove the fields with these names, which must agree; return their value and its name."""
    found = [(fields.pop(name), name) for name in names if name in fields]
    for value, name in found[1:]:
        if value != found[0][0]:
            raise ConversationError(f"{place}.{name}", f"says something else than {found[0][1]}; keep one of them")
    return found[0] if found else (None, None)


def _learned(fields: dict[str, Any], role: str, place: str) -> bool:
    """Whether a message is learned: the assistant's are, unless their weight (OpenAI) or train (Axolotl) says no."""
    weight, key = _one_of(fields, ("weight", "train"), place)
    if key is None:
        return role == "assistant"
    if not isinstance(weight, bool | int | float) or weight not in (0, 1):
        raise ConversationError(
            f"{place}.{key}", f"is {weight!r:.50}; a message is learned (1, true) or not (0, false)"
        )
    if weight and role != "assistant":
        raise ConversationError(f"{place}.{key}", "asks to learn what the assistant did not write; leave it out")
    return bool(weight)


def _calls_in(content: object, place: str) -> list[dict[str, Any]]:
    calls = calls_of(content, place)
    if not calls:
        raise ConversationError(place, "names no call")
    return calls


def _add_answer(message: Message, fields: dict[str, Any], pieces: list[ContentPart], place: str) -> None:
    message["content"] = "".join(piece.text for piece in pieces if piece.kind == "text")
    refusal = fields.pop("refusal", None)
    if isinstance(refusal, str) and refusal:
        if message["content"]:
            raise ConversationError(f"{place}.refusal", "stands beside a content; keep one of them")
        message["content"] = refusal
    thought = thought_of(fields, THOUGHTS, [piece.text for piece in pieces if piece.kind == "thought"], place)
    if thought:
        message["reasoning_content"] = thought
    calls = [
        *message.pop("tool_calls", ()),
        *calls_of(fields.pop("tool_calls", []), f"{place}.tool_calls"),
        *(piece.call for piece in pieces if piece.call is not None),
    ]
    if fields.get("function_call"):
        if calls:
            raise ConversationError(f"{place}.function_call", "stands beside other calls; keep one of them")
        calls = [call_of(fields.pop("function_call"), f"{place}.function_call")]
    if calls:
        message["tool_calls"] = calls


def _spread(message: Message, pieces: Sequence[ContentPart]) -> list[Message]:
    """Return the messages of a user or a tool whose parts may be results of calls; any other message as it is."""
    if message["role"] == "assistant" or not pieces:
        return [message]
    found: list[Message] = []
    for piece in pieces:
        if piece.kind == "result":
            found.append({"role": "tool", "content": piece.text, "tool_call_id": piece.id})
        elif found and found[-1]["role"] == message["role"] and "tool_call_id" not in found[-1]:
            found[-1]["content"] += piece.text
        else:
            found.append({**message, "content": piece.text})
    return found


def _link_results(messages: Sequence[Message]) -> None:
    """Give each result and its call one id, and the result the name of its tool, which some chat templates write. A
    result belongs to the call with its id; without such a one, to the call with its number."""
    calls: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            calls = list(message.get("tool_calls", ()))
        elif message["role"] == "tool" and calls:
            id, name = message.get("tool_call_id"), message.get("name")
            call = next((each for each in calls if id is not None and each.get("id") == id), calls[0])
            if (id is not None and call.get("id", id) != id) or name not in (None, call["function"]["name"]):
                continue
            calls.remove(call)
            message["name"] = call["function"]["name"]
            if (known := call.get("id", id)) is not None:
                message["tool_call_id"] = call["id"] = known
