"""Tools: functions that an agent offers to the model, and calls where it asks for them.

In a model's own chat template, for those that know tools (agent/tool_calls.py). A model without a template writes what
it wants computed between [ and ], and goes on behind the result: sampling.stop must hold "]". There a call that
fails ends the conversation.
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
"""Characters of a result that the model is told."""


class ToolError(ValueError):
    """A tool cannot do what it is asked for; the model is told why."""


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: Mapping[str, str]
    """Names of its parameters, all of them text, and what each is."""
    call: Callable[..., str | Awaitable[str]]
    """Given the parameters by name. Raises ToolError; whatever else it raises costs the conversation."""

    @property
    def offer(self) -> dict[str, Any]:
        """As OpenAI's API and chat templates have it."""
        properties = {name: {"type": "string", "description": what} for name, what in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": [*properties]}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": schema},
        }


class ToolAgent(MultiTurnAgent):
    """An environment that is a set of problems, some tools and a `get_trajectory_reward`.

    A conversation ends with a response that calls none. A call that cannot be read is no call; one of a tool that is
    not there, or with other arguments, is answered by what is wrong with it.
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
                    return None  # such a model need not have the letters to read it
                results.append(f"error: {error}")
        return render_results(self.tokenizer, results)

    def tool_calls(self, responses: Sequence[str]) -> int:
        """See MultiTurnAgent.tool_calls: also those of tools that are not there."""
        return sum(len(calls_in(response, self.tokenizer, self.tools)) for response in responses)

    async def _result(self, call: Call) -> str:
        """Raises ToolError."""
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r}, only {', '.join(tool.name for tool in self.tools)}")
        arguments = json.loads(call.arguments)
        if arguments.keys() != tool.parameters.keys():
            raise ToolError(f"{tool.name} takes {', '.join(tool.parameters)}")
        result = tool.call(**{name: str(value) for name, value in arguments.items()})
        return (await result if isawaitable(result) else result)[:LONGEST_RESULT]


def render_tool_prompt(tokenizer: Tokenizer, message: str, tools: Sequence[Tool]) -> str:
    """The prompt that asks for an answer to `message` and offers the tools.

    Raises ValueError where the chat template knows no tools, or none whose calls can be read.
    """
    if tokenizer.chat_template is None:
        return message
    if reader_for(tokenizer.chat_template) is None:
        raise ValueError(
            "the tokenizer's chat template offers no tools in a format that is known here (Hermes, Llama 3)"
        )
    prompt = tokenizer.conversation([{"role": "user", "content": message}], [tool.offer for tool in tools])
    assert prompt is not None  # there is a template
    return prompt


def calls_in(response: str, tokenizer: Tokenizer, tools: Sequence[Tool]) -> list[Call]:
    """The calls of a response, in their order."""
    if tokenizer.chat_template is None:
        begin = response.rfind(BEGIN)
        if begin < 0 or not response.endswith(END):
            return []
        tool = tools[0]
        return [Call(tool.name, json.dumps({next(iter(tool.parameters)): response[begin + 1 : -1]}))]
    reader = reader_for(tokenizer.chat_template)
    assert reader is not None  # render_tool_prompt has seen to it
    # Where a prompt opens the thought, the response has only its end.
    found = AfterThought(reader, thinks=THOUGHT_END in response and THOUGHT not in response)
    return found.push(response)[1] + found.finish()[1]


def render_results(tokenizer: Tokenizer, results: Sequence[str]) -> str:
    """The text between a response with calls and the next one."""
    if tokenizer.chat_template is None:
        return "".join(results)
    return next_turn(tokenizer, *results, role="tool")
