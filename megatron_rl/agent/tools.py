"""Tools: functions that an agent offers to the model and calls on its request.

Models whose chat template supports tools call them in their own format (agent/tool_calls.py). A model without a
template writes an expression between [ and ], and continues after the result: sampling.stop must contain "]". A failed
call then ends the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from megatron_rl.agent.multi_turn import MultiTurnAgent
from megatron_rl.agent.prompts import next_turn
from megatron_rl.agent.tool_calls import THOUGHT, THOUGHT_END, AfterThought, Call, reader_for
from megatron_rl.model.tokenizer import Tokenizer

BEGIN, END = "[", "]"
LONGEST_RESULT = 2000
"""Longest result shown to the model, in characters."""


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
        """Schema of the tool for OpenAI's API and chat templates."""
        properties = {name: {"type": "string", "description": what} for name, what in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": [*properties]}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": schema},
        }


class ToolAgent(MultiTurnAgent):
    """An environment of problems, tools and a `get_trajectory_reward`.

    A conversation ends with a response without calls. Text that cannot be parsed as a call is not a call; a call of an
    unknown tool, or with wrong arguments, is answered with an error message.
    """

    tools: Sequence[Tool]

    async def get_observation(self, responses: Sequence[str], golden: Mapping[str, Any]) -> str | None:
        calls = calls_in(responses[-1], self.tokenizer, self.tools)
        if not calls:
            return None
        results = []
        for call in calls:
            try:
                results.append(await self._result(call))
            except ToolError as error:
                if self.tokenizer.chat_template is None:
                    return None  # such a model's alphabet may lack the letters of a message
                results.append(f"error: {error}")
        return render_results(self.tokenizer, results)

    def tool_calls(self, responses: Sequence[str]) -> int:
        return sum(len(calls_in(response, self.tokenizer, self.tools)) for response in responses)

    async def _result(self, call: Call) -> str:
        """Call the tool. Raises ToolError."""
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r}, only {', '.join(tool.name for tool in self.tools)}")
        arguments = json.loads(call.arguments)
        if arguments.keys() != tool.parameters.keys():
            raise ToolError(f"{tool.name} takes {', '.join(tool.parameters)}")
        result = tool.call(**{name: str(value) for name, value in arguments.items()})
        return (await result if isawaitable(result) else result)[:LONGEST_RESULT]


def render_tool_prompt(tokenizer: Tokenizer, message: str, tools: Sequence[Tool]) -> str:
    """Return the prompt that requests an answer to `message` and offers the tools.

    Raises ValueError if the chat template does not support tools, or if its call format is unknown.
    """
    if tokenizer.chat_template is None:
        return message
    if reader_for(tokenizer.chat_template) is None:
        raise ValueError("the tokenizer's chat template does not support tools in a known format (Hermes or Llama 3)")
    prompt = tokenizer.conversation([{"role": "user", "content": message}], [tool.offer for tool in tools])
    assert prompt is not None  # there is a template
    return prompt


def calls_in(response: str, tokenizer: Tokenizer, tools: Sequence[Tool]) -> list[Call]:
    """Return the calls of a response in order."""
    if tokenizer.chat_template is None:
        begin = response.rfind(BEGIN)
        if begin < 0 or not response.endswith(END):
            return []
        tool = tools[0]
        return [Call(tool.name, json.dumps({next(iter(tool.parameters)): response[begin + 1 : -1]}))]
    reader = reader_for(tokenizer.chat_template)
    assert reader is not None  # render_tool_prompt has checked it
    # If the prompt opens the thought, the response contains only its end.
    found = AfterThought(reader, thinks=THOUGHT_END in response and THOUGHT not in response)
    return found.push(response)[1] + found.finish()[1]


def render_results(tokenizer: Tokenizer, results: Sequence[str]) -> str:
    """Return the text between a response with calls and the next response."""
    if tokenizer.chat_template is None:
        return "".join(results)
    return next_turn(tokenizer, *results, role="tool")
