"""Tokenizer of scripted conversations: readable text with a chat template, without any file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.agent.scripted_trial import CodePoints

END = "\ufdd0"
"""End token in a text. A noncharacter of Unicode, so no message should contain it."""
CALL, CALL_END = "<tool_call>", "</tool_call>"
TAGS = (CALL, CALL_END, "<think>", "</think>")
"""Texts that are one token each."""
_PIECE = re.compile("|".join(map(re.escape, TAGS)) + "|.", re.DOTALL)


class PlainChat(CodePoints):
    """Most tokens are code points. Messages look so, and a model calls tools as Qwen's do:

    user: What is 2+3?<end>
    assistant: <tool_call>
    {"name": "add", "arguments": {"a": 2, "b": 3}}
    </tool_call><end>
    tool: 5<end>
    """

    vocab_size = CodePoints.vocab_size + len(TAGS)
    chat_template = f"tools, messages, {CALL}, {CALL_END}"
    renderer = "template"

    def encode(self, text: str) -> list[int]:
        return [self._token(piece) for piece in _PIECE.findall(text)]

    encode_prompt = encode

    def _token(self, piece: str) -> int:
        if piece in TAGS:
            return CodePoints.vocab_size + TAGS.index(piece)
        return self.eos_id if piece == END else ord(piece)

    def show(self, token: int) -> str:
        return TAGS[token - CodePoints.vocab_size] if token >= CodePoints.vocab_size else super().show(token)

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        if variables:
            raise ValueError(f"{next(iter(variables))}: scripted answers have no template variables; use --model")
        offered = [f"tools: {json.dumps([*tools])}\n"] if tools else []
        said = [f"{message['role']}: {_text(message)}{END}\n" for message in messages]
        return "".join((*offered, *said, "assistant: " if add_generation_prompt else ""))


def _text(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    written = [
        f"{CALL}\n{json.dumps({'name': call['name'], 'arguments': call['arguments']})}\n{CALL_END}" for call in calls
    ]
    return "\n".join(filter(None, [message.get("content") or "", *written]))
