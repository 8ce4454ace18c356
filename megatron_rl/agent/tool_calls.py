"""Tool calls in the text of an answer, in the formats that chat templates request.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>      Hermes, Qwen: any number, with text around them
    {"name": ..., "parameters": {...}}                            Llama 3: the whole answer; several separated by ;

Text that cannot be parsed as a call is content. Nothing that a model writes is evaluated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol
from uuid import uuid4

from megatron_rl.inference.text import overlap

BEGIN, END = "<tool_call>", "</tool_call>"


def _new_id() -> str:
    return f"call_{uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class Call:
    """One function call that the model requests."""

    name: str
    arguments: str
    """Arguments as a JSON object."""
    id: str = field(default_factory=_new_id, compare=False)


class CallReader(Protocol):
    """Incremental parser that splits the text of one answer into content and calls."""

    def push(self, text: str) -> tuple[str, list[Call]]: ...

    def finish(self) -> tuple[str, list[Call]]:
        """Return the rest at the end of the text."""
        ...


class PlainText:
    """Parser for a model without tools: all text is content."""

    def push(self, text: str) -> tuple[str, list[Call]]:
        return text, []

    def finish(self) -> tuple[str, list[Call]]:
        return "", []


class TaggedCalls:
    """Parser of Hermes' format."""

    def __init__(self) -> None:
        self._text = ""  # received but not yet returned
        self._called = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        self._text += text
        content = ""
        calls: list[Call] = []
        while True:
            begin = self._text.find(BEGIN)
            if begin < 0:
                held = overlap(self._text, BEGIN)
                certain = len(self._text[: len(self._text) - held].rstrip())  # space around a call is not content
                content, self._text = content + self._text[:certain], self._text[certain:]
                return content, calls
            end = self._text.find(END, begin)
            if end < 0:
                before = self._text[:begin].rstrip()
                content, self._text = content + before, self._text[len(before) :]
                return content, calls
            call = _read_call(self._text[begin + len(BEGIN) : end], "arguments")
            end += len(END)
            if call:
                self._called = True
                content += self._text[:begin].rstrip()
                calls.append(call)
            else:
                content += self._text[:end]
            self._text = self._text[end:]

    def finish(self) -> tuple[str, list[Call]]:
        rest, self._text = self._text, ""
        before, begin, raw = rest.partition(BEGIN)
        if begin and (call := _read_call(raw, "arguments")):  # a model may end its turn without the closing tag
            return before.rstrip(), [call]
        return "" if self._called and not rest.strip() else rest, []


class WholeCalls:
    """Parser of Llama 3's format. Its <|python_tag|> is a special token, which the text does not contain."""

    def __init__(self) -> None:
        self._text = ""
        self._is_content = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        self._text += text
        begun = self._text.lstrip()
        if begun and not begun.startswith("{"):
            self._is_content = True
        if not self._is_content:
            return "", []
        content, self._text = self._text, ""
        return content, []

    def finish(self) -> tuple[str, list[Call]]:
        rest, self._text = self._text, ""
        calls, left = [], rest.strip()
        while left:
            try:
                _, end = _DECODER.raw_decode(left)
            except (ValueError, RecursionError):
                return rest, []
            call = _read_call(left[:end], "parameters")
            if call is None:
                return rest, []
            calls.append(call)
            left = left[end:].lstrip("; \n")
        return ("", calls) if calls else (rest, [])


THOUGHT, THOUGHT_END = "<think>", "</think>"


def opens_thought(text: str) -> bool:
    """Whether the text continues with a thought, as after the prompts of models that always think first."""
    return text.rstrip().endswith(THOUGHT)


class AfterThought:
    """Parser for models that may think before they answer: thoughts are content, and calls within them are ignored."""

    def __init__(self, reader: type[CallReader], *, thinks: bool) -> None:
        """thinks: whether the answer begins inside a thought."""
        self._reader = reader()
        self._text = ""  # received but not yet returned
        self._thinks: bool | None = True if thinks else None  # None: the answer has not begun

    def push(self, text: str) -> tuple[str, list[Call]]:
        if self._thinks is False:
            return self._reader.push(text)
        self._text += text
        if self._thinks is None:
            begun = self._text.lstrip()
            if not begun or (len(begun) < len(THOUGHT) and THOUGHT.startswith(begun)):
                return "", []
            self._thinks = begun.startswith(THOUGHT)
        end = self._text.find(THOUGHT_END) if self._thinks else 0
        if end < 0:
            certain = len(self._text) - overlap(self._text, THOUGHT_END)
            thought, self._text = self._text[:certain], self._text[certain:]
            return thought, []
        end += len(THOUGHT_END) * self._thinks
        thought, rest, self._text, self._thinks = self._text[:end], self._text[end:], "", False
        content, calls = self._reader.push(rest)
        return thought + content, calls

    def finish(self) -> tuple[str, list[Call]]:
        if self._thinks:
            return self._text, []
        content, calls = self._reader.push(self._text)
        rest, more = self._reader.finish()
        return content + rest, [*calls, *more]


def reader_for(template: str) -> type[TaggedCalls] | type[WholeCalls] | None:
    """Return the parser of the format that a chat template requests; None if the format is unknown."""
    if "tools" not in template:
        return None
    if BEGIN in template:
        return TaggedCalls
    return WholeCalls if '"parameters"' in template else None


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not valid in JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def _read_call(text: str, key: str) -> Call | None:
    try:
        found: Any = _DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not isinstance(found.get(key), dict):
        return None
    try:
        arguments = json.dumps(found[key], ensure_ascii=False, allow_nan=False)  # 1e999 is infinite
        f"{found['name']}{arguments}".encode()
    except ValueError:  # JSON can spell half a surrogate pair, which cannot be encoded
        return None
    return Call(found["name"], arguments)
