"""An agent with a tool, on OpenAI's client and chat completions.

It reads a problem from standard input and prints its reward. The address, key and model of the policy are in the
environment, where the client looks for them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

from openai import OpenAI

MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
MOST_CALLS = 4


def main() -> None:
    problem = json.loads(sys.stdin.readline())
    client = OpenAI(timeout=None)
    messages: list[Any] = [{"role": "user", "content": problem["prompt"]}]
    calls = 0
    while True:
        completion = client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"], messages=messages, tools=[MULTIPLY]
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls or calls >= MOST_CALLS:
            break
        for call in message.tool_calls:
            calls += 1
            result = multiply(call.function.arguments)
            print(f"multiply{call.function.arguments} is {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    numbers = re.findall(r"-?\d+", message.content or "")
    print(json.dumps({"reward": float(numbers[-1:] == [str(problem["answer"])]), "tool_calls": calls}))


def multiply(arguments: str) -> str:
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) * int(given["b"]))
    except (ValueError, TypeError, KeyError) as error:
        return f"error: {error}"


main()
