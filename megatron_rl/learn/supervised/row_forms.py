"""Published forms of rows: the columns that hold the conversation, and the conversation in them.

    {"messages": [{"role": "user", ...}, ...]}                        OpenAI, TRL
    {"conversations": [{"from": "human", "value": ...}, ...]}         ShareGPT
    {"prompt": ..., "completion": ...}                                TRL: texts, or lists of messages
    {"instruction": ..., "input": ..., "output": ...}                 Alpaca
    {"question": ..., "answer": ...}

Beside them, `tools` are definitions of tools, and `system` is the system message of a row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.agent.prompts import messages_in
from megatron_rl.agent.text_rows import as_text, parse_json, value_at
from megatron_rl.model.chat.conversation import Conversation, ConversationError, conversation_of
from megatron_rl.model.chat.tool_forms import kind_of
from megatron_rl.recipe.data import DataConfig

CONVERSATIONS = ("messages", "conversations", "conversation")
"""Columns of whole conversations; the first that a set has holds its rows, as in TRL."""
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("prompt", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answers"),
    ("problem", "solution"),
)
INPUTS = {"instruction": ("input", "context")}
"""Columns, by that of the prompt, whose text follows it on a new line: Alpaca's and Dolly's."""
CALLS = ("query", "answers")
TOOLS = ("tools", "functions")
SYSTEMS = ("system", "system_prompt")
HISTORY = "history"  # column of earlier prompts and answers, each a list of both (LLaMA-Factory)


@dataclass(frozen=True, slots=True)
class Form:
    """Columns of a data set's conversations."""

    messages: str = ""  # column of whole conversations; empty: the rows are prompts and answers
    prompt: str = ""
    inputs: tuple[str, ...] = ()
    answer: str = ""
    answer_is_calls: bool = False
    history: str = ""
    system: str = ""
    tools: str = ""

    def __str__(self) -> str:
        what = {
            "conversations": self.messages,
            "prompts": " and ".join(filter(None, [self.prompt, *self.inputs])),
            "answers": self.answer,
            "earlier turns": self.history,
            "system messages": self.system,
            "tools": self.tools,
        }
        return ", ".join(f"{name} in {column}" for name, column in what.items() if column)

    @property
    def wanted(self) -> str:
        if self.messages:
            return f"messages ({self.messages})"
        return f"both a prompt ({self.prompt}) and an answer ({self.answer})"


def form_of(data: DataConfig, columns: Collection[str]) -> Form:
    """Return the form of a data set with these columns. Raises ValueError if it is none, or may be several."""
    beside = Form(
        system=next((name for name in SYSTEMS if name in columns), ""),
        tools=data.tools or next((name for name in TOOLS if name in columns), ""),
    )
    if data.prompt is not None and data.answer is not None:
        return replace(beside, prompt=data.prompt, answer=data.answer)
    whole = data.messages or next((name for name in CONVERSATIONS if name in columns), "")
    if whole:
        return replace(beside, messages=whole)
    found = [pair for pair in PAIRS if {*pair} <= {*columns} and (pair != CALLS or beside.tools)]
    if not found:
        raise ValueError(
            f"no known columns of conversations among {', '.join(columns)}: name them by data.messages, or by "
            f"data.prompt and data.answer. Known are {', '.join(CONVERSATIONS[:2])}, and "
            f"{', '.join(' + '.join(pair) for pair in PAIRS)}"
        )
    if len(found) > 1:
        raise ValueError(
            f"the columns {' and '.join(' + '.join(pair) for pair in found)} may each be prompts and answers: "
            "name them by data.prompt and data.answer"
        )
    prompt, answer = found[0]
    return replace(
        beside,
        prompt=prompt,
        answer=answer,
        inputs=tuple(name for name in INPUTS.get(prompt, ()) if name in columns),
        answer_is_calls=found[0] == CALLS,
        history=HISTORY if HISTORY in columns else "",
    )


def columns_of(form: Form) -> list[str]:
    """Return the columns, without paths inside them, that must exist."""
    needed = filter(None, [form.messages, form.prompt, form.answer, form.tools])
    return [column.partition(".")[0] for column in needed]


def row_of(form: Form, row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what is trained on of a row: `messages`, `learned` and `tools`, or texts `prompt` and `answer` and maybe a
    `system` message. None if the row has none of it.

    Raises ConversationError.
    """
    system = _text(_value(row, form.system), form.system)
    tools = _value(row, form.tools) or None
    if form.messages:
        given = _value(row, form.messages)
        talk = messages_in(given, form.messages) or given
        return _learned(_behind(system, form, conversation_of(talk, tools, field=form.messages))) if talk else None
    asked, answer = _value(row, form.prompt), _value(row, form.answer)
    inputs = [_text(_value(row, name), name) for name in form.inputs]
    if not asked or answer in (None, "", [], {}):
        return None
    earlier = _history(_value(row, form.history))
    prompt, answered = messages_in(asked, form.prompt), messages_in(answer, form.answer)
    if form.answer_is_calls:
        answered = [{"role": "function_call", "content": answer}]
    if prompt is None:
        text = "\n".join(filter(None, [as_text(asked), *inputs]))
        if answered is None and not tools and not earlier:
            return {"prompt": text, "answer": as_text(answer)} | ({"system": system} if system else {})
        prompt = [{"role": "user", "content": text}]
    if answered is None:
        answered = [{"role": "assistant", "content": as_text(answer)}]
    context = conversation_of(prompt, tools, field=form.prompt).as_context()
    completion = conversation_of(answered, field=form.answer)
    if completion.messages and completion.messages[0]["role"] != "assistant":
        raise ConversationError(
            completion.places[0],
            f"is the {completion.messages[0]['role']}'s; an answer begins with a message of the assistant. For whole "
            "conversations give data.messages",
        )
    return _learned(_behind(system, form, earlier + context + completion if earlier else context + completion))


def _behind(system: str, form: Form, conversation: Conversation) -> Conversation:
    """Return the conversation behind the system message that stands beside it."""
    if not system:
        return conversation
    if any(message["role"] == "system" for message in conversation.messages):
        raise ConversationError(form.system, "stands beside a system message among the messages; keep one of them")
    return conversation_of([{"role": "system", "content": system}], field=form.system) + conversation


def _learned(conversation: Conversation) -> dict[str, Any] | None:
    if not conversation.messages:
        return None
    values = {"messages": [*conversation.messages], "learned": [*conversation.learned]}
    return values | ({"tools": [*conversation.tools]} if conversation.tools else {})


def conversation_in(values: Mapping[str, Any]) -> Conversation:
    messages = values["messages"]
    places = tuple(f"messages.{number}" for number in range(len(messages)))
    return Conversation(tuple(messages), tuple(values.get("tools", ())), tuple(values["learned"]), places)


def _history(value: Any) -> Conversation | None:
    """Return the earlier turns of a row. Their answers are learned, as in LLaMA-Factory."""
    if isinstance(value, str) and value:
        value = parse_json(value, HISTORY)
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise ConversationError(HISTORY, "is not a list of pairs of a prompt and an answer")
    roles = ("user", "assistant")
    return conversation_of(
        [{"role": role, "content": text} for pair in value for role, text in zip(roles, pair, strict=True)],
        field=HISTORY,
    )


def _text(value: Any, column: str) -> str:
    if isinstance(value, dict | list):
        raise ConversationError(column, f"is {kind_of(value)}, not a text")
    return as_text(value) or ""


def _value(row: Mapping[str, Any], column: str) -> Any:
    return value_at(row, column.split(".")) if column else None
