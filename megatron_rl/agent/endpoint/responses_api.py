"""OpenAI's /v1/responses in terms of chats: its items become messages, and an answer becomes items.

Only what agents use: texts, function calls and their outputs, reasoning, `previous_response_id` within the session, and
streams.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import ConfigDict, Field, ValidationError

from megatron_rl.agent.server.bodies import Body, ChatBody, Objects, check_said, check_tool_choice
from megatron_rl.generate.serving.api_errors import ApiError, invalid, unsupported
from megatron_rl.model.chat.messages import Message

Item = dict[str, Any]


class _Loose(Body):
    """Unknown fields are ignored: clients send many that concern OpenAI's own storage and tools."""

    model_config = ConfigDict(extra="ignore")


class FunctionTool(_Loose):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] = {}


class Reasoning(_Loose):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class TextOptions(_Loose):
    format: dict[str, Any] = {"type": "text"}


class ResponsesBody(_Loose):
    model: str | None = None
    input: str | Objects[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Objects[FunctionTool] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    reasoning: Reasoning = Reasoning()
    text: TextOptions = TextOptions()
    stream: bool = False
    background: bool = False
    conversation: Any = None
    prompt: Any = None

    def check(self) -> None:
        """Raise ApiError for what would change the answer and is not supported."""
        for name in ("background", "conversation", "prompt"):
            if getattr(self, name):
                raise unsupported(name)


def new_messages(body: ResponsesBody) -> list[Message]:
    """Return the messages of a request's input. Raises ApiError."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    return messages_of(body.input)


def answer_of(response: Mapping[str, Any]) -> list[Message]:
    return messages_of(response["output"])


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Return the messages of these items. Raises ApiError."""
    messages: list[Message] = []
    for number, item in enumerate(items):
        try:
            _add(messages, item)
        except (KeyError, TypeError, AttributeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ApiError(400, f"input.{number}: {what}", param="input", code="invalid_value") from error
    return messages


def _add(messages: list[Message], item: Item) -> None:
    """Add an item to the messages. Reasoning, text and calls of one answer are separate items."""
    kind = item.get("type", "message")
    if kind == "message":
        if item["role"] != "assistant":
            messages.append({"role": item["role"], "content": item["content"]})
            return
        answer = _answer(messages)
        answer["content"] = [*answer.get("content", ()), *_parts(item["content"])]
    elif kind == "reasoning":
        if thought := "".join(part["text"] for part in _parts(item.get("content") or [])):
            _answer(messages)["reasoning_content"] = thought
    elif kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        _answer(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    else:
        raise TypeError(f"items of type {str(kind)[:50]!r} are not supported here")


def _answer(messages: list[Message]) -> Message:
    """Return the answer that the last items belong to, or begin one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _parts(content: str | Sequence[Item]) -> Sequence[Item]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def as_chat(body: ResponsesBody, messages: Sequence[Message]) -> ChatBody:
    """Return the request as one of a chat. Raises ApiError.

    messages: those of earlier responses and of this request, without instructions.
    """
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    chosen = {"temperature": body.temperature, "top_p": body.top_p, "max_completion_tokens": body.max_output_tokens}
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    check_tool_choice(choice, [tool.name for tool in body.tools])
    try:
        chat = ChatBody.model_validate(
            {
                "model": body.model,
                "messages": [*system, *messages],
                "tools": [
                    {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                    for tool in body.tools
                ],
                "tool_choice": choice,
                "response_format": _response_format(body.text.format),
                "parallel_tool_calls": body.parallel_tool_calls,
                "reasoning_effort": body.reasoning.effort,
                **{name: value for name, value in chosen.items() if value is not None},
            }
        )
    except ValidationError as error:
        names = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
        raise invalid(error, names) from error
    check_said(chat)
    return chat


def _response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        return dict(given)
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def response_of(body: ResponsesBody, chat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response. chat: body of the response to the same request as one of a chat."""
    (choice,) = chat["choices"]
    cut_off = choice["finish_reason"] == "length"
    usage = chat["usage"]
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut_off else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "model": chat["model"],
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "output": [*_items(choice["message"], "incomplete" if cut_off else "completed")],
        "tools": [tool.model_dump() | {"strict": False} for tool in body.tools],
        "tool_choice": body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_output_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "text": {"format": body.text.format},
        "truncation": "disabled",
        "store": False,
        "metadata": {},
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _items(message: Message, status: str) -> Iterator[Item]:
    if thought := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        yield {"id": _id("rs"), "type": "reasoning", "summary": [], "content": content, "status": status}
    calls = message.get("tool_calls") or []
    if message.get("content") or not calls:
        part: Item = {"type": "output_text", "text": message.get("content") or "", "annotations": [], "logprobs": []}
        yield {"id": _id("msg"), "type": "message", "role": "assistant", "content": [part], "status": status}
    for call in calls:
        yield {"id": _id("fc"), "type": "function_call", "call_id": call["id"], **call["function"], "status": status}


def events_of(response: Mapping[str, Any]) -> Iterator[bytes]:
    for number, event in enumerate(_events(response)):
        content = json.dumps({**event, "sequence_number": number}, ensure_ascii=False, separators=(",", ":"))
        yield f"event: {event['type']}\ndata: {content}\n\n".encode()


def _events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        empty: Item = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        added = {**item, **empty, "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        if item["type"] == "function_call":
            yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **at, **done}
        else:
            yield from _text_events(item["content"][0], {**at, "content_index": 0})
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _text_events(part: Mapping[str, Any], at: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kind = f"response.{part['type']}"
    logprobs: Item = {"logprobs": []} if part["type"] == "output_text" else {}
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    yield {"type": f"{kind}.delta", **at, "delta": part["text"], **logprobs}
    yield {"type": f"{kind}.done", **at, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **at, "part": part}


def _id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"
