"""A chain of LangChain whose answer is a value: with_structured_output asks for it by `response_format`.

`pip install langchain-openai`. method="function_calling" forces the call of a named tool instead.
"""

from __future__ import annotations

import json
import os
import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Guess(BaseModel):
    number: int = Field(ge=0, le=9)


problem = json.loads(sys.stdin.readline())
guess = ChatOpenAI(model=os.environ["OPENAI_MODEL"]).with_structured_output(Guess).invoke(problem["prompt"])
print(1 - abs(guess.number - problem["answer"]) / 9)
