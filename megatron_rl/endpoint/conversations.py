"""Conversations of chat requests: which one a request continues, compared as programs send them back.

A program repeats the model's answers in its next request, seldom byte for byte: reasoning is left out, a content of ""
becomes null, arguments of calls are parsed and written again, fields are added. Such an answer is still the known one.
A changed text, or other calls, are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.chat.messages import Message, for_template

_Compared = tuple[str, str, tuple[tuple[str, str], ...]]
"""Role, text, and the calls as (name, arguments)."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and what else decides how a chat template writes them."""

    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    """Variables of the chat template in the request."""
    settings: str
    """Tools and variables, to be compared."""
    messages: tuple[Message, ...]
    """The messages, as chat templates read them."""
    compared: tuple[_Compared, ...]
    thoughts: tuple[str, ...]
    """Reasoning of each message."""

    @classmethod
    def of(
        cls, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> Conversation:
        """Return the conversation of a request, whose messages are as in OpenAI's API. Raises ValueError."""
        plain = tuple(_with_tool_names(for_template(messages)))
        settings = json.dumps([tools, variables], sort_keys=True)
        return cls(tools, variables, settings, plain, tuple(map(_compared, plain)), tuple(map(_thought, plain)))

    def __len__(self) -> int:
        return len(self.messages)

    def continues(self, known: Conversation) -> bool:
        """Whether this conversation consists of the known one and further messages."""
        count = len(known)
        return (
            len(self) > count
            and self.settings == known.settings
            and self.compared[:count] == known.compared
            and all(not ours or ours == its for ours, its in zip(self.thoughts, known.thoughts, strict=False))
        )

    def after(self, known: Conversation) -> Conversation:
        """Return this conversation, which continues `known`, with the messages of `known` in place of its own. They
        take no memory of their own, and include the reasoning that a program may have left out."""
        count = len(known)
        return replace(
            known,
            messages=known.messages + self.messages[count:],
            compared=known.compared + self.compared[count:],
            thoughts=known.thoughts + self.thoughts[count:],
        )

    def answered(self, answer: Message) -> Conversation:
        """Return the conversation with the model's answer, as the program received it."""
        (plain,) = for_template([answer])
        return replace(
            self,
            messages=(*self.messages, plain),
            compared=(*self.compared, _compared(plain)),
            thoughts=(*self.thoughts, _thought(plain)),
        )


def _with_tool_names(messages: Sequence[Message]) -> Iterator[Message]:
    """Add the name of the tool to results that lack it, by the id of the call: some chat templates write it."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        name = names.get(message.get("tool_call_id", ""))
        yield message | {"name": name} if name is not None and "name" not in message else message


def _compared(message: Message) -> _Compared:
    text = message["content"]
    calls = tuple(
        (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls", ())
    )
    # Blanks around an answer are often stripped, and chat templates strip them as well.
    return message["role"], text.strip() if message["role"] == "assistant" else text, calls


def _thought(message: Message) -> str:
    thought: str = message.get("reasoning_content", "")
    return thought.strip()
