"""Published forms of rows: the columns that hold the conversation, and the conversation in them.

    {"messages": [{"role": "user", ...}, ...]}                        OpenAI, TRL
    {"conversations": [{"from": "human", "value": ...}, ...]}         ShareGPT
    {"prompt": ..., "completion": ...}                                TRL: texts, or lists of messages
    {"instruction": ..., "input": ..., "output": ...}                 Alpaca
    {"question": ..., "answer": ...}

Beside them, `tools` are definitions of tools, and `system` is the system message of a row.

The first rows decide which columns hold the prompts and answers, or the conversations. Whatever else belongs to a form
is read of each row that has it, so that the order of the rows changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_rl.agent.data_rows import root_of
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
"""Columns beside a conversation; the first that has a value in a row counts."""
HISTORY = "history"  # column of earlier prompts and answers, each a list of both (LLaMA-Factory)


@dataclass(frozen=True, slots=True)
class Form:
    """Columns of a data set's conversations. Rows may lack those of `inputs` and `history`."""

    messages: str = ""  # column of whole conversations; empty: the rows are prompts and answers
    prompt: str = ""
    inputs: tuple[str, ...] = ()
    answer: str = ""
    answer_is_calls: bool = False
    history: str = ""
    tools: str = ""  # column that the recipe names; empty: those of TOOLS
    rivals: tuple[tuple[str, ...], ...] = ()
    """Columns that would have made another form of the set, had they stood in the first rows."""

    def described(self, columns: Collection[str]) -> str:
        """Describe what is read of these columns, and name those that nothing reads."""
        found = {
            use: (" and " if use == "prompts" else " or ").join(name for name in names if root_of(name) in columns)
            for use, names in self._uses().items()
        }
        said = ", ".join(f"{use} in {names}" for use, names in found.items() if names)
        unread = ", ".join(self.unread(columns))
        return f"{said}; nothing reads {unread}" if unread else said

    def unread(self, columns: Collection[str]) -> list[str]:
        """Return the columns that nothing reads."""
        read = {root_of(name) for names in self._uses().values() for name in names}
        return [name for name in columns if name not in read]

    def _uses(self) -> dict[str, tuple[str, ...]]:
        return {
            "conversations": (self.messages,),
            "prompts": (self.prompt, *self.inputs),
            "answers": (self.answer,),
            "earlier turns": (self.history,),
            "system messages": SYSTEMS,
            "tools": (self.tools,) if self.tools else TOOLS,
        }

    @property
    def wanted(self) -> str:
        if self.messages:
            return f"messages ({self.messages})"
        return f"both a prompt ({self.prompt}) and an answer ({self.answer})"


def form_of(data: DataConfig, columns: Collection[str]) -> Form:
    """Return the form of a data set whose first rows have these columns. Raises ValueError if it is none, or may be
    several."""
    tools = (data.tools,) if data.tools else TOOLS
    has_tools = any(root_of(name) in columns for name in tools)
    if data.prompt is not None and data.answer is not None:
        pair = (data.prompt, data.answer)
        late = tuple((name,) for name in tools) if pair == CALLS and not has_tools else ()
        return replace(_form_of_pair(pair, has_tools), tools=data.tools or "", rivals=late)
    if data.messages:
        return Form(messages=data.messages, tools=data.tools or "")
    whole = next((name for name in CONVERSATIONS if name in columns), "")
    if whole:
        earlier = CONVERSATIONS[: CONVERSATIONS.index(whole)]
        return Form(messages=whole, tools=data.tools or "", rivals=tuple((name,) for name in earlier))
    found = [pair for pair in PAIRS if {*pair} <= {*columns} and (pair != CALLS or has_tools)]
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
    others = [pair for pair in PAIRS if pair not in (found[0], CALLS)]
    calls = [(*CALLS, name) for name in tools if found[0] != CALLS]
    rivals = (*((name,) for name in CONVERSATIONS), *others, *calls)
    return replace(_form_of_pair(found[0], has_tools), tools=data.tools or "", rivals=rivals)


def _form_of_pair(pair: tuple[str, str], has_tools: bool) -> Form:
    prompt, answer = pair
    if pair not in PAIRS:
        return Form(prompt=prompt, answer=answer)
    return Form(
        prompt=prompt,
        answer=answer,
        inputs=INPUTS.get(prompt, ()),
        answer_is_calls=pair == CALLS and has_tools,
        history=HISTORY,
    )


def columns_of(form: Form) -> list[str]:
    """Return the columns, without paths inside them, that must exist."""
    return [*map(root_of, filter(None, [form.messages, form.prompt, form.answer, form.tools]))]


def row_of(form: Form, row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what is trained on of a row: `messages`, `learned` and `tools`, or texts `prompt` and `answer` and maybe a
    `system` message. None if the row has none of it.

    Raises ConversationError, also for a row that has columns of another form.
    """
    _check_rivals(form, row)
    system = _system(row)
    tools = _value(row, form.tools) or None if form.tools else _first(row, TOOLS)[1]
    if form.messages:
        given = _value(row, form.messages)
        talk = messages_in(given, form.messages) or given
        return _learned(_behind(system, conversation_of(talk, tools, field=form.messages))) if talk else None
    asked, answer = _value(row, form.prompt), _value(row, form.answer)
    inputs = [_text(_value(row, name), name) for name in form.inputs]
    if not asked or not _is_said(answer):
        return None
    earlier = _history(_value(row, form.history))
    prompt, answered = messages_in(asked, form.prompt), messages_in(answer, form.answer)
    if form.answer_is_calls:
        answered = [{"role": "function_call", "content": answer}]
    if prompt is None:
        text = "\n".join(filter(None, [as_text(asked), *inputs]))
        if answered is None and not tools and not earlier:
            return {"prompt": text, "answer": as_text(answer)} | ({"system": system.text} if system else {})
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
    return _learned(_behind(system, earlier + context + completion if earlier else context + completion))


def _check_rivals(form: Form, row: Mapping[str, Any]) -> None:
    """Raise ConversationError if the row would have made another form of the set."""
    for rival in form.rivals:
        if all(_is_said(row.get(name)) for name in rival):
            used = [name for name in (form.messages, form.prompt, form.answer) if name]
            late = next(name for name in rival if name not in used)
            raise ConversationError(
                late,
                f"says something in this row and is not in the first rows, which are read from "
                f"{' + '.join(used)}: put such a row among them, or name the columns by data.messages, or by "
                "data.prompt and data.answer",
            )


def _is_said(value: Any) -> bool:
    return value not in (None, "", [], {})


class _System(NamedTuple):
    column: str
    text: str


def _system(row: Mapping[str, Any]) -> _System | None:
    column, value = _first(row, SYSTEMS)
    text = _text(value, column)
    return _System(column, text) if text else None


def _first(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, Any]:
    """Return the first of the columns that has a value in the row, and the value; "" and None if none has."""
    return next(((name, value) for name in columns if _is_said(value := row.get(name))), ("", None))


def _behind(system: _System | None, conversation: Conversation) -> Conversation:
    """Return the conversation behind the system message that stands beside it."""
    if system is None:
        return conversation
    if any(message["role"] == "system" for message in conversation.messages):
        raise ConversationError(system.column, "stands beside a system message among the messages; keep one of them")
    return conversation_of([{"role": "system", "content": system.text}], field=system.column) + conversation


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
