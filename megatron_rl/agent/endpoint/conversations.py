"""Conversations of chat requests: which one a request continues, compared as programs send them back.

A program repeats the model's answers in its next request, seldom byte for byte: reasoning is left out, a content of ""
becomes null, arguments of calls are parsed and written again, fields are added. Such an answer is still the known one.
A changed text, or other calls, are not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.model.chat.conversation import Conversation, conversation_of
from megatron_rl.model.chat.messages import Message

_Compared = tuple[str, str, tuple[tuple[str, str], ...]]
"""Role, text, and the calls as (name, arguments)."""


@dataclass(frozen=True, slots=True)
class KnownConversation:
    said: Conversation
    variables: Mapping[str, Any]
    settings: str
    compared: tuple[_Compared, ...]
    thoughts: tuple[str, ...]

    @classmethod
    def of(cls, said: Conversation, variables: Mapping[str, Any]) -> KnownConversation:
        settings = json.dumps([said.tools, variables], sort_keys=True)
        return cls(said, variables, settings, tuple(map(_compared, said.messages)), tuple(map(_thought, said.messages)))

    def __len__(self) -> int:
        return len(self.said.messages)

    def continues(self, known: KnownConversation) -> bool:
        count = len(known)
        return (
            len(self) > count
            and self.settings == known.settings
            and self.compared[:count] == known.compared
            and all(not ours or ours == its for ours, its in zip(self.thoughts, known.thoughts, strict=False))
        )

    def after(self, known: KnownConversation) -> KnownConversation:
        """Return this conversation, which continues `known`, with the messages of `known` in place of the request's
        copies. They take no further memory, and include the reasoning that a program may have left out."""
        count = len(known)
        return replace(
            known,
            said=replace(known.said + self.said[count:], places=self.said.places),
            compared=known.compared + self.compared[count:],
            thoughts=known.thoughts + self.thoughts[count:],
        )

    def answered(self, answer: Message) -> KnownConversation:
        answered = conversation_of([answer], field="answer")
        (plain,) = answered.messages
        return replace(
            self,
            said=self.said + answered,
            compared=(*self.compared, _compared(plain)),
            thoughts=(*self.thoughts, _thought(plain)),
        )


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
