"""Grammars of forms, for the chat templates of published families: whatever they allow is read as what was forced."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from optional import needs
from published_templates import PUBLISHED

from megatron_rl.model.chat.answer_form import AnswerForm, NoForm, grammar_of
from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.chat.conversation import conversation_of
from megatron_rl.model.grammar import Grammars

pytestmark = needs("llguidance")

SIZE: dict[str, Any] = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "größer"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["size", "count"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SIZE}} for name in ("order", "return_it")]
CALLS = ("qwen2.5", "qwen3", "qwen3-thinking-2507", "hermes", "deepseek-v3", "deepseek-r1")
"""Families whose calls are a name and a JSON object that is read back."""
OTHER_CALLS = ("qwen3-coder", "mistral-nemo", "gemma-3")
CHANNELS = "gpt-oss"
THINK = ("qwen3-thinking-2507", "deepseek-r1")


def drawn(chat: Chat, form: AnswerForm, prompt: Sequence[int], seed: int) -> list[int]:
    """Draw an answer from all tokens that the form allows, with a short thought if it begins within one."""
    end = chat.tokenizer.encode("</think>")
    state, draw = Grammars(chat.tokenizer).begin(grammar_of(form, chat, prompt)), random.Random(seed)
    tokens: list[int] = []
    while not tokens or tokens[-1] not in chat.tokenizer.end_ids:
        assert len(tokens) < 200
        may = {*np.flatnonzero(np.unpackbits(state.allowed, bitorder="little")).tolist()}
        tokens.append(end[0] if len(end) == 1 and {*end} <= may and len(may) > 100 else draw.choice(sorted(may)))
        state.take(tokens[-1])
    return tokens


def prompt_of(chat: Chat, tools: Sequence[Any] = ()) -> list[int]:
    return chat.prompt(conversation_of([{"role": "user", "content": "A size, please."}], tools or None))


@pytest.mark.parametrize("family", CALLS)
def test_a_forced_call_is_read_as_one_call(family: str) -> None:
    chat = Chat(PUBLISHED[family].tokenizer()).check()
    prompt = prompt_of(chat, TOOLS)
    for seed in range(6):
        found = chat.parse(drawn(chat, AnswerForm(tools=TOOLS), prompt, seed), prompt, TOOLS)
        (call,) = found.tool_calls
        assert call.name in ("order", "return_it") and [*json.loads(call.arguments)] == ["size", "count"]
        assert found.content == ""


@pytest.mark.parametrize("family", sorted(PUBLISHED.keys() - {CHANNELS}))
def test_a_forced_content_is_the_whole_content(family: str) -> None:
    chat = Chat(PUBLISHED[family].tokenizer()).check()
    prompt = prompt_of(chat)
    answers = [drawn(chat, AnswerForm(SIZE), prompt, seed) for seed in range(3)]
    for answer in answers:
        found = chat.parse(answer, prompt)
        assert [*json.loads(found.content)] == ["size", "count"] and not found.tool_calls
    if family in THINK:
        assert all(chat.tokenizer.encode("</think>")[0] in answer for answer in answers)


@pytest.mark.parametrize("family", OTHER_CALLS)
def test_calls_of_other_kinds_are_refused(family: str) -> None:
    chat = Chat(PUBLISHED[family].tokenizer()).check()
    with pytest.raises(NoForm, match="calls"):
        grammar_of(AnswerForm(tools=TOOLS), chat, prompt_of(chat))


def test_answers_in_channels_are_refused() -> None:
    chat = Chat(PUBLISHED[CHANNELS].tokenizer())
    with pytest.raises(NoForm, match="channels"):
        grammar_of(AnswerForm(SIZE), chat, prompt_of(chat))
