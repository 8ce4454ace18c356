"""An agent of pydantic-ai whose answer is a value: it forces the call of a tool (`tool_choice: required`).

`pip install 'pydantic-ai-slim[openai]'`. NativeOutput(Guess) as output_type asks by `response_format` instead.
"""

from __future__ import annotations

import json
import os
import sys

from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel


class Guess(BaseModel):
    number: int = Field(ge=0, le=9)


problem = json.loads(sys.stdin.readline())
agent = Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"]), output_type=Guess)
guess = agent.run_sync(problem["prompt"]).output
print(1 - abs(guess.number - problem["answer"]) / 9)
