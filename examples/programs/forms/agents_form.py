"""An agent of the OpenAI Agents SDK whose answer is a value: output_type asks for it by `text.format` of /v1/responses.

`pip install openai-agents`.
"""

from __future__ import annotations

import json
import os
import sys

from agents import Agent, RunConfig, Runner
from pydantic import BaseModel, Field


class Guess(BaseModel):
    number: int = Field(ge=0, le=9)


problem = json.loads(sys.stdin.readline())
agent = Agent(name="guesser", output_type=Guess, model=os.environ["OPENAI_MODEL"])
without_traces = RunConfig(tracing_disabled=True)  # otherwise it reports every call to OpenAI
guess = Runner.run_sync(agent, problem["prompt"], run_config=without_traces).final_output
print(1 - abs(guess.number - problem["answer"]) / 9)
