"""Conversations as programs send them back."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.agent.endpoint.conversations import KnownConversation
from megatron_rl.model.chat.conversation import conversation_of

USER = {"role": "user", "content": "1+1?"}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "2"}


def call(arguments: Any = '{"x": 1, "y": 2}', name: str = "add") -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}


ANSWER = {"role": "assistant", "content": "Well.", "reasoning_content": "Hm.", "tool_calls": [call()]}


def conversation(*messages: dict[str, Any], tools: Any = (), **variables: Any) -> KnownConversation:
    return KnownConversation.of(conversation_of(messages, tools), variables)


KNOWN = conversation(USER).answered(ANSWER)


@pytest.mark.parametrize(
    "sent_back",
    [
        ANSWER,
        {**ANSWER, "reasoning_content": None},
        {"role": "assistant", "content": "Well.", "tool_calls": [call()]},
        {**ANSWER, "content": [{"type": "text", "text": "Well."}]},
        {**ANSWER, "content": "Well. \n"},
        {**ANSWER, "tool_calls": [call('{"y":2,"x":1}')]},
        {**ANSWER, "tool_calls": [{**call(), "id": "another"}]},
        {**ANSWER, "refusal": None, "annotations": [], "name": "me"},
    ],
)
def test_answer_that_is_sent_back_in_another_spelling_is_the_same(sent_back: dict[str, Any]) -> None:
    assert conversation(USER, sent_back, RESULT).continues(KNOWN)


@pytest.mark.parametrize("content", ["", None])
def test_null_and_empty_content_are_the_same(content: str | None) -> None:
    known = conversation(USER).answered({"role": "assistant", "content": None, "tool_calls": [call()]})
    sent_back = {"role": "assistant", "content": content, "tool_calls": [call()]}
    assert conversation(USER, sent_back, RESULT).continues(known)


@pytest.mark.parametrize(
    "other",
    [
        conversation({**USER, "content": "1+2?"}, ANSWER, RESULT),
        conversation(USER, {**ANSWER, "content": "No."}, RESULT),
        conversation(USER, {**ANSWER, "reasoning_content": "Oh."}, RESULT),
        conversation(USER, {**ANSWER, "tool_calls": [call('{"x": 1, "y": 3}')]}, RESULT),
        conversation(USER, {**ANSWER, "tool_calls": [call(name="sub")]}, RESULT),
        conversation(USER, {**ANSWER, "tool_calls": []}, RESULT),
        conversation({"role": "system", "content": "Be brief."}, USER, ANSWER, RESULT),
        conversation(USER, ANSWER, RESULT, tools=[{"name": "add"}]),
        conversation(USER, ANSWER, RESULT, enable_thinking=False),
        conversation(USER, ANSWER),
        conversation(USER),
    ],
)
def test_changed_text_calls_tools_or_variables_are_another_conversation(other: KnownConversation) -> None:
    assert not other.continues(KNOWN)


def test_reasoning_that_a_program_leaves_out_stays_known() -> None:
    following = conversation(USER, {**ANSWER, "reasoning_content": None}, RESULT)
    assert following.after(KNOWN).said.messages[1]["reasoning_content"] == "Hm."
