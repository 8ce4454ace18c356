"""Conversations on which renderers are compared with chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.model.chat.messages import Message

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}, "most": {"type": "integer"}},
            "required": ["word"],
        },
    },
}
ARGUMENTS: dict[str, Any] = {"word": "Größe", "most": 3}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "  What is a tree? 木 🌳\n"}
MORE: Message = {"role": "user", "content": "And a bush?"}
ANSWER: Message = {"role": "assistant", "content": "A plant."}
THOUGHT: Message = {"role": "assistant", "content": "A plant.", "reasoning_content": "It has leaves."}
RESULTS: tuple[Message, ...] = (
    {"role": "tool", "name": "look_up", "tool_call_id": "functions.look_up:0", "content": "a plant"},
    {"role": "tool", "name": "look_up", "tool_call_id": "functions.look_up:1", "content": '{"found": true}'},
)


def calling(content: str = "", calls: int = 1, **more: str) -> Message:
    functions = [{"name": "look_up", "arguments": dict(ARGUMENTS)} for _ in range(calls)]
    made = [{"id": f"functions.look_up:{n}", "type": "function", "function": each} for n, each in enumerate(functions)]
    return {"role": "assistant", "content": content, "tool_calls": made, **more}


@dataclass(frozen=True, slots=True)
class ProbeConversation:
    name: str
    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()


OPENINGS = (
    ProbeConversation("a question", [USER]),
    ProbeConversation("a system message", [SYSTEM, USER]),
    ProbeConversation("tools", [USER], [TOOL]),
    ProbeConversation("tools and a system message", [SYSTEM, USER], [TOOL, TOOL]),
)

CONVERSATIONS = (
    *OPENINGS,
    ProbeConversation("several turns", [USER, ANSWER, MORE]),
    ProbeConversation("several turns and a system message", [SYSTEM, USER, ANSWER, MORE, ANSWER, USER]),
    ProbeConversation("a tool result", [USER, calling(), RESULTS[0]], [TOOL]),
    ProbeConversation("two tool results", [SYSTEM, USER, calling("Let me see.", 2), *RESULTS], [TOOL]),
    ProbeConversation("a turn after a tool result", [USER, calling(), RESULTS[0], ANSWER, MORE], [TOOL]),
    ProbeConversation("earlier reasoning", [USER, THOUGHT, MORE]),
    ProbeConversation(
        "reasoning before a tool result",
        [USER, calling(reasoning_content="I do not know."), RESULTS[0]],
        [TOOL],
    ),
)
