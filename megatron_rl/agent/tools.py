"""Tools: functions that an agent offers to the model and calls on its request.

Models whose chat template supports tools call them in their own format (the room chat reads it). A model without a
template writes an expression between [ and ], and continues after the result: sampling.stop must contain "]". A failed
call then ends the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from megatron_rl.agent.multi_turn import ConversationAgent, Reply, Turn
from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.chat.conversation import conversation_of
from megatron_rl.model.chat.messages import ToolCall

BEGIN, END = "[", "]"
LONGEST_RESULT = 2000


class ToolError(ValueError):
    """A tool call failed; the message is shown to the model."""


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: Mapping[str, str]
    """Description of each parameter by name; all parameters are strings."""
    call: Callable[..., str | Awaitable[str]]
    """Called with the parameters by name. A ToolError is shown to the model; any other exception loses the
    conversation."""

    @property
    def offer(self) -> dict[str, Any]:
        properties = {name: {"type": "string", "description": what} for name, what in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": [*properties]}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": schema},
        }


class ToolAgent(ConversationAgent):
    """An environment of problems, tools and a `get_trajectory_reward`.

    A conversation ends with a response without calls. Text that cannot be parsed as a call is not a call, nor is a call
    within reasoning; a call of an unknown tool, or with wrong arguments, is answered with an error message.
    """

    tools: Sequence[Tool]

    @property
    def offers(self) -> Sequence[Mapping[str, Any]]:
        return [tool.offer for tool in self.tools]

    def turn(self, prompt: list[int], answer: list[int]) -> Turn:
        text = self.tokenizer.decode(answer)
        if self.chat.has_template:
            return Turn(text, self.chat.parse(answer, prompt, self.offers).tool_calls)
        return Turn(text, self._bracketed(text))

    async def reply(self, turns: Sequence[Turn], golden: Mapping[str, Any]) -> Reply:
        calls = turns[-1].calls
        if not calls:
            return None
        results = []
        for call in calls:
            try:
                results.append(await self._result(call))
            except ToolError as error:
                if not self.chat.has_template:
                    return None  # such a model's alphabet may lack the letters of a message
                results.append(f"error: {error}")
        if not self.chat.has_template:
            return "".join(results)
        return [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result}
            for call, result in zip(calls, results, strict=True)
        ]

    def _bracketed(self, text: str) -> list[ToolCall]:
        begin = text.rfind(BEGIN)
        if begin < 0 or not text.endswith(END):
            return []
        tool = self.tools[0]
        return [ToolCall(tool.name, json.dumps({next(iter(tool.parameters)): text[begin + 1 : -1]}))]

    async def _result(self, call: ToolCall) -> str:
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r}, only {', '.join(tool.name for tool in self.tools)}")
        arguments = json.loads(call.arguments)
        if arguments.keys() != tool.parameters.keys():
            raise ToolError(f"{tool.name} takes {', '.join(tool.parameters)}")
        result = tool.call(**{name: str(value) for name, value in arguments.items()})
        return (await result if isawaitable(result) else result)[:LONGEST_RESULT]


def render_tool_prompt(chat: Chat, message: str, tools: Sequence[Tool]) -> str:
    """Return the prompt that requests an answer to `message` and offers the tools. Raises ValueError if the chat
    template does not support tools, or if its calls cannot be read."""
    if not chat.has_template:
        return message
    if not chat.has_tools:
        raise ValueError(
            "the tokenizer's chat template offers no tools, or writes calls in a format that cannot be read; "
            "tokenizer.renderer can name a renderer that fits the model"
        )
    return chat.text(conversation_of([{"role": "user", "content": message}], [tool.offer for tool in tools]))
