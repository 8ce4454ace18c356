"""Forms into which an answer is forced, as grammars: JSON by a schema, or the call of a tool as the model writes calls.

How a model writes a call is found by rendering one: the text before the name, between name and arguments, and behind
them. Models whose calls are not JSON have no such form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.chat.messages import THINK, THINK_END, Tool
from megatron_rl.model.tokenizer import Tokenizer

_NAME, _ID = "name_of_the_tool", "id_of_the_call"
_ARGUMENTS = {"text": "argument_of_the_tool", "number": 1}
_TOOL: Tool = {"type": "function", "function": {"name": _NAME, "parameters": {"type": "object"}}}
_ASKED = {"role": "user", "content": "Call it."}
_CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}],
}
_SEPARATORS = ((", ", ": "), (",", ":"))
"""Separators of items, and of a key and its value, in JSON as templates write it."""
_TAIL_TOKENS = 8
_CHANNEL = "<|channel|>"


class NoForm(ValueError):
    """The model's answers cannot be forced into a form; the message says why."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    schema: Mapping[str, Any] | None = None
    """JSON schema of the content; None: the answer has no content."""
    tools: Sequence[Tool] = ()
    """Tools of which the answer may call one, instead of a content."""
    strict: bool = False
    """Whether a keyword of the schema that cannot be enforced is an error, instead of being ignored."""


class _CallText(NamedTuple):
    before: str  # the name of the tool
    between: str
    behind: str  # its arguments
    separators: tuple[str, str]


def grammar_of(form: AnswerForm, chat: Chat, prompt: Sequence[int]) -> str:
    """Return the grammar of an answer to a prompt: a thought if the model thinks first, the content or a call, and an
    end token. Raises NoForm."""
    if _CHANNEL in (chat.tokenizer.chat_template or ""):
        raise NoForm("the model writes its answers in channels, which no form covers")
    spelling = _Spelling(chat.tokenizer)
    rules, bodies = [], []
    if form.schema is not None:
        bodies.append("content")
        rules.append(f"content: {_json(form.schema, _SEPARATORS[0], strict=form.strict)}")
    for number, tool in enumerate(form.tools):
        text, function = _call_text(chat), tool["function"]
        parameters = {"type": "object", **function["parameters"]}
        if parameters["type"] != "object":
            raise NoForm(f"the parameters of {function['name']} are not an object")
        arguments = _json(parameters, text.separators, strict=False)
        parts = spelling.of(text.before + function["name"] + text.between), arguments, spelling.of(text.behind)
        bodies.append(f"call_{number}")
        rules.append(f"call_{number}: {' '.join(filter(None, parts))}")
    ends = ",".join(map(str, sorted(chat.tokenizer.end_ids)))
    start = f"start: {_thought(chat, prompt)} ({' | '.join(bodies)}) <[{ends}]>"
    return "\n".join([start, *rules, "text: /(.|\\n)*/", "blanks: /[ \\n]*/", ""])


def _json(schema: Mapping[str, Any], separators: tuple[str, str], *, strict: bool) -> str:
    # Without free white space: a model that has not learned when to stop would write blanks up to its last token.
    item, key = separators
    style = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    style |= {"coerce_one_of": True, "lenient": not strict}
    return f"%json {json.dumps({**schema, 'x-guidance': style})}"


def _thought(chat: Chat, prompt: Sequence[int]) -> str:
    """Return the rule of the thought before an answer; "" for a model that does not think or has thought already."""
    tokenizer = chat.tokenizer
    tail = tokenizer.decode(prompt[-_TAIL_TOKENS:], special=True).rstrip()
    opened = tail.endswith(THINK)
    if not opened and (tail.endswith(THINK_END) or THINK_END not in (tokenizer.chat_template or "")):
        return ""
    spelling = _Spelling(tokenizer)
    close = spelling.of(THINK_END)
    if not close.startswith("<["):
        raise NoForm(f"the model thinks before it answers, and {THINK_END} is not one token of it")
    return f"text {close} blanks" if opened else f"({spelling.of(THINK)} text {close} blanks)?"


class _Spelling:
    """Texts in a grammar. Control tokens and tags are named by their numbers: spelled out they are others."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, text: str) -> str:
        from megatron_rl.model.chat.formats import is_markup  # with the library, which takes time to import

        tokens = self._tokenizer.encode(text) if text else []
        if b"".join(map(self._tokenizer.token_bytes, tokens)) != text.encode():
            return json.dumps(text, ensure_ascii=False)  # a tokenizer that begins each text with a blank
        parts: list[str] = []
        letters = b""
        for token in tokens:
            if is_markup(self._tokenizer, token):
                parts += [json.dumps(letters.decode(), ensure_ascii=False)] if letters else []
                parts, letters = [*parts, f"<[{token}]>"], b""
            else:
                letters += self._tokenizer.token_bytes(token)
        return " ".join([*parts, json.dumps(letters.decode(), ensure_ascii=False)] if letters else parts)


@lru_cache(maxsize=32)
def _call_text(chat: Chat) -> _CallText:
    """Raises NoForm."""
    tokenizer, variables = chat.tokenizer, chat.variables
    try:
        prompt = tokenizer.conversation([_ASKED], [_TOOL], variables) or ""
        whole = tokenizer.conversation([_ASKED, _CALLED], [_TOOL], variables, add_generation_prompt=False) or ""
    except ValueError as error:
        raise NoForm(f"the chat template writes no calls: {error}") from error
    thought = f"\n{THINK_END}\n\n" if prompt.rstrip().endswith(THINK) else ""  # the answer begins within it
    before = prompt if whole.startswith(prompt) else prompt.rstrip().removesuffix(THINK)
    if not whole.startswith(before):
        raise NoForm("the chat template writes the conversation before a call in other words")
    call = whole.removeprefix(before)
    if THINK_END in call:  # an empty thought, which `_thought` allows for
        call = call.rpartition(THINK_END)[2].lstrip()
    ends = (call.find(tokenizer.show(end)) for end in tokenizer.end_ids)
    call = call[: min((end for end in ends if end >= 0), default=len(call))]
    before, name, rest = call.partition(_NAME)
    for separators in _SEPARATORS:
        between, arguments, behind = rest.partition(json.dumps(_ARGUMENTS, separators=separators))
        if name and arguments and _ID not in call and _NAME not in rest:
            break
    else:
        raise NoForm("the model does not write calls as a name and a JSON object, so they cannot be forced")
    read = chat.parse(tokenizer.encode(thought + call), tokenizer.encode(prompt), [_TOOL]).tool_calls
    if [(each.name, json.loads(each.arguments)) for each in read] != [(_NAME, _ARGUMENTS)]:
        raise NoForm("the calls of the model cannot be read back, so they cannot be forced")
    return _CallText(before, between, behind, separators)
