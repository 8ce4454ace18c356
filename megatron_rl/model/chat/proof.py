"""A proof that nothing said is lost: each part of a conversation stands in what was rendered from it.

It knows no template. A template is a program that may leave out a role, a field or a message without a word: the model
is then asked without the question, or learns an empty answer. The proof has two halves:

    form    the template writes each part of a conversation of this form, whose texts are words that occur nowhere else.
            Rendered once for each form: it finds what is left out, however short the real texts are.
    text    each text of this conversation occurs in its rendering, in its order: finds what is left out or changed for
            what it says.

White space around a text may be stripped, JSON and Python may escape it, and system messages and tools may stand
anywhere: templates merge them into other messages. A prompt may lack the thoughts of earlier answers, as most templates
drop them by design; a learned answer may lack nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unicodedata import normalize

from megatron_rl.model.chat.messages import THINK, THINK_END, Conversation, ConversationError, Message
from megatron_rl.model.control_tokens import MARK

MOST_FORMS = 1000
"""Forms of conversations whose proof is kept."""
NEAR = 2000
"""Characters behind the last part in which to look for the next one first, since most stand there."""
SHOWN = 60


class Rendering(NamedTuple):
    text: str
    learned: str | None = None


class Lost(NamedTuple):
    part: str
    message: int | None = None  # number of its message; None for a tool


class Proof:
    """Proves renderings by one template, and keeps which forms it writes."""

    def __init__(self, writer: str) -> None:
        self._writer = writer
        self._forms: dict[Any, Lost | None] = {}

    def check(self, said: Conversation, found: Rendering, render: Callable[[Conversation], Rendering]) -> None:
        """Raise ConversationError if a part of the conversation does not stand in its rendering.

        render: renders a conversation of the same form. It may raise ValueError: then the text alone is looked at.
        """
        lost = self._lost_form(said, render) or _lost_text(said, found)
        if lost is not None:
            place = lost.part if lost.message is None else f"{said.places[lost.message]}.{lost.part}"
            raise ConversationError(place, f"{self._writer} does not write it: {_shown(said, lost)!r}")

    def _lost_form(self, said: Conversation, render: Callable[[Conversation], Rendering]) -> Lost | None:
        form = _form_of(said)
        if form not in self._forms:
            if len(self._forms) >= MOST_FORMS:
                self._forms.clear()
            sample = _sample_of(said)
            try:
                self._forms[form] = _lost_in(_Search(sample, exact=False), sample, render(sample))
            except ValueError:
                self._forms[form] = None
        return self._forms[form]


def _lost_text(said: Conversation, found: Rendering) -> Lost | None:
    """Return the first part of a conversation that does not stand in its rendering; None if all do.

    The first look takes a text as it is wherever that occurs, which may be behind its real place if the template has
    escaped it there. A second look tries all spellings, and a third one composes Unicode, as some tokenizers do.
    """
    lost = _lost_in(_Search(said, exact=False), said, found)
    if lost is None:
        return None
    lost = _lost_in(_Search(said, exact=True), said, found)
    if lost is None:
        return None
    learned = None if found.learned is None else normalize("NFKC", found.learned)
    composed = Rendering(normalize("NFKC", found.text), learned)
    return lost if _lost_in(_Search(said, exact=True, composed=True), said, composed) is not None else None


def _lost_in(search: _Search, said: Conversation, found: Rendering) -> Lost | None:
    if (lost := search.all_in(found.text)) is not None:
        return lost
    return None if found.learned is None else search.learned_in(found.learned)


class _Search:
    def __init__(self, said: Conversation, *, exact: bool, composed: bool = False) -> None:
        """
        exact: whether of several spellings the earliest one counts.
        composed: whether the texts to look in are composed Unicode.
        """
        self._said, self._exact, self._composed = said, exact, composed
        self._text = ""

    def all_in(self, text: str) -> Lost | None:
        """Return the first part that is not in a rendering, apart from thoughts."""
        self._text, end = _unmarked(text), 0
        for number, tool in enumerate(self._said.tools):
            if self._end(tool["function"]["name"], 0) < 0:
                return Lost(f"tools.{number}.function.name")
        for number, message in enumerate(self._said.messages):
            is_system = message["role"] == "system"
            found = self._end_of(message, 0 if is_system else end, whole=False)
            if isinstance(found, Lost):
                return found._replace(message=number)
            end = end if is_system else found
        return None

    def learned_in(self, text: str) -> Lost | None:
        self._text, end = _unmarked(text), 0
        for number, message in enumerate(self._said.messages):
            if not self._said.learned[number]:
                continue
            found = self._end_of(message, end, whole=True)
            if isinstance(found, Lost):
                return found._replace(message=number)
            end = found
        return None

    def _end_of(self, message: Message, start: int, *, whole: bool) -> int | Lost:
        """Return where a message ends that begins at `start` or later, or its first part that is missing. whole: with
        its thoughts. The parts may stand in any order."""
        end = self._end_of_content(message, start, whole=whole)
        if end < 0:
            return Lost("content")
        if whole and (thought := message.get("reasoning_content")):
            if (found := self._end(thought, start)) < 0:
                return Lost("reasoning_content")
            end = max(end, found)
        at = start
        for number, call in enumerate(message.get("tool_calls", ())):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            at = self._end(name, at)
            if at < 0:
                return Lost(f"tool_calls.{number}.function.name")
            at = self._end_of_arguments(arguments, at)
            if at < 0:
                return Lost(f"tool_calls.{number}.function.arguments")
        return max(end, at)

    def _end_of_content(self, message: Message, start: int, *, whole: bool) -> int:
        content = message["content"]
        end = self._end(content, start)
        if end >= 0 or message["role"] != "assistant" or THINK_END not in content:
            return end
        thought, _, rest = content.rpartition(THINK_END)
        end = self._end(rest, start)
        if whole and end >= 0:
            end = max(end, found) if (found := self._end(thought.lstrip().removeprefix(THINK), start)) >= 0 else -1
        return end

    def _end_of_arguments(self, arguments: dict[str, Any], start: int) -> int:
        at = end = start
        for spellings in _leaves(arguments):
            ends = (each for text in spellings if (each := self._end(text, at)) >= 0)
            at = min(ends, default=-1) if self._exact else next(ends, -1)
            if at < 0 and self._exact:  # a template may sort them
                at = min((each for text in spellings if (each := self._end(text, start)) >= 0), default=-1)
            if at < 0:
                return -1
            end = max(end, at)
        return end

    def _end(self, said: str, start: int) -> int:
        """Return the end of the first place where a text stands at `start` or later; -1 if there is none."""
        said = _unmarked(said)
        if self._composed:
            said = normalize("NFKC", said)
        said = said.strip()
        near = start + NEAR + 2 * len(said)
        if not self._exact and (at := self._text.find(said, start, near)) >= 0:
            return at + len(said)
        spelled = {json.dumps(said, ensure_ascii=False)[1:-1], json.dumps(said)[1:-1], repr(said)[1:-1]} - {said}
        if self._exact:
            found = [(self._text.find(text, start), text) for text in (said, *spelled)]
            return min((at + len(text) for at, text in found if at >= 0), default=-1)
        for text, until in (*((text, near) for text in spelled), *((text, None) for text in (said, *spelled))):
            if (at := self._text.find(text, start, until)) >= 0:
                return at + len(text)
        return -1


def _leaves(value: Any) -> Iterator[Sequence[str]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield (key,)
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str):
        yield (value,)
    elif value is None or isinstance(value, bool):
        yield json.dumps(value), str(value)
    else:
        yield (json.dumps(value),)


def _unmarked(text: str) -> str:
    return text.replace(MARK, "") if MARK in text else text


def _shown(said: Conversation, lost: Lost) -> str:
    value: Any = {"tools": said.tools} if lost.message is None else said.messages[lost.message]
    for name in lost.part.split("."):
        value = value.get(name) if isinstance(value, dict) else value[int(name)]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:SHOWN] + ("..." if len(text) > SHOWN else "")


# Conversations that stand for all of their form


def _form_of(said: Conversation) -> tuple[Any, ...]:
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


def _sample_of(said: Conversation) -> Conversation:
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
