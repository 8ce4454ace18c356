"""The same agent on the OpenAI Agents SDK (`pip install openai-agents`), which asks /v1/responses.

mrl calls `rollout` in its own process for each rollout, with a client of the policy.
"""

from __future__ import annotations

import os
import re
from typing import Any

from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiplies two integers."""
    return a * b


async def rollout(client: AsyncOpenAI, problem: dict[str, Any]) -> dict[str, float]:
    agent = Agent(
        name="calculator",
        tools=[multiply],
        model=OpenAIResponsesModel(os.environ["OPENAI_MODEL"], client),
    )
    result = await Runner.run(
        agent,
        problem["prompt"],
        max_turns=5,
        run_config=RunConfig(tracing_disabled=True),  # otherwise it reports every call to OpenAI
    )
    numbers = re.findall(r"-?\d+", str(result.final_output))
    return {"reward": float(numbers[-1:] == [str(problem["answer"])]), "responses": len(result.raw_responses)}
