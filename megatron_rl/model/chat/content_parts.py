"""The content of a message: a text, or a list of parts as in OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.model.chat.messages import ConversationError
from megatron_rl.model.chat.tool_forms import arguments_of, items_of, kind_of, said

PART_WITHOUT_MEANING = {
    "annotations": "sources of a text that are not part of it",
    "cache_control": "advice to a cache",
    "index": "a number of the record",
    "logprobs": "numbers of another sampler",
    "signature": "a seal on a thought, for the provider that made it",
}
"""Keys of a part that are ignored, since they do not change what is said. Key -> reason."""
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
ORDER = ("thought", "text", "call")
"""Order in which chat templates write the parts of an answer."""


@dataclass(frozen=True, slots=True)
class ContentPart:
    kind: Literal["text", "thought", "call", "result"]
    text: str = ""
    call: dict[str, Any] | None = None
    id: str = ""


def checked_text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise ConversationError(place, f"is {kind_of(value)}, not a text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConversationError(place, f"has half a character, which is not text: {error.reason}") from error
    return value


def pieces_of(content: object, role: str, place: str) -> list[ContentPart]:
    if content is None:
        return []
    if not isinstance(content, Sequence) or isinstance(content, str):
        return [ContentPart("text", checked_text(content, place))]
    pieces = [_piece(each, role, f"{place}.{number}") for number, each in enumerate(items_of(content, place, "parts"))]
    if role == "assistant":
        ranks = [ORDER.index(piece.kind) for piece in pieces]
        late = next((n for n in range(1, len(ranks)) if ranks[n] < ranks[n - 1]), None)
        if late is not None:
            raise ConversationError(
                f"{place}.{late}",
                f"is a {pieces[late].kind} behind a {pieces[late - 1].kind}; chat templates write thought, text and "
                "calls of an answer in this order: divide it into several messages",
            )
    return pieces


def _piece(given: object, role: str, place: str) -> ContentPart:
    if not isinstance(given, Mapping):
        raise ConversationError(place, f"is {kind_of(given)}, not a part such as a text")
    fields = {name: value for name, value in said(given).items() if name not in PART_WITHOUT_MEANING}
    kind = fields.pop("type", "text")
    if isinstance(kind, str) and kind in TEXTS:
        found = ContentPart("text", checked_text(fields.pop(TEXTS[kind], None), f"{place}.{TEXTS[kind]}"))
    elif kind == "thinking" and role == "assistant":
        found = ContentPart("thought", checked_text(fields.pop("thinking", None), f"{place}.thinking"))
    elif kind == "tool_use" and role == "assistant":
        function = {
            "name": checked_text(fields.pop("name", None), f"{place}.name"),
            "arguments": arguments_of(fields.pop("input", None), f"{place}.input"),
        }
        id = checked_text(fields.pop("id", ""), f"{place}.id")
        found = ContentPart("call", call={"id": id, "type": "function", "function": function})
    elif kind == "tool_result" and role in ("user", "tool"):
        inner = pieces_of(fields.pop("content", ""), "tool", f"{place}.content")
        id = checked_text(fields.pop("tool_use_id", None), f"{place}.tool_use_id")
        if fields.get("is_error") is False:
            del fields["is_error"]
        found = ContentPart("result", "".join(piece.text for piece in inner), id=id)
    else:
        raise ConversationError(
            f"{place}.type", f"is {str(kind)[:50]!r} in a message of role {role}; the model reads text only"
        )
    for name, value in fields.items():
        if value not in ("", [], {}):
            raise ConversationError(f"{place}.{name}", "is not known here; leave it out")
    return found


def thought_of(fields: dict[str, Any], names: Sequence[str], parts: Sequence[str], place: str) -> str:
    """Return the thought of a message, and remove the fields that have it. Raises ConversationError.

    names: fields that may hold the thought. parts: thoughts among the parts of the content.
    """
    found = {f"{place}.{name}": checked_text(fields.pop(name), f"{place}.{name}") for name in names if name in fields}
    if parts:
        found[f"{place}.content"] = "".join(parts)
    for name in ("thinking_blocks", "reasoning_details"):  # LiteLLM's and OpenRouter's copies of the thought
        texts = _block_texts(fields.pop(name, []), f"{place}.{name}")
        if texts and not any(found.values()):
            found[f"{place}.{name}"] = texts
    given = {where: text for where, text in found.items() if text}
    thought = next(iter(given.values()), "")
    for where, text in given.items():
        if text != thought:
            raise ConversationError(where, f"is another thought than {next(iter(given))}; keep one of them")
    return thought


def _block_texts(blocks: object, place: str) -> str:
    found = ""
    for number, block in enumerate(items_of(blocks, place, "blocks")):
        if not isinstance(block, Mapping):
            raise ConversationError(f"{place}.{number}", f"is {kind_of(block)}, not a block of a thought")
        text = next((block[name] for name in ("thinking", "text", "summary") if block.get(name) is not None), "")
        found += checked_text(text, f"{place}.{number}")
    return found
