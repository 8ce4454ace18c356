"""A program for OpenAI's API that asks a model how many pieces of an article are in stock, and lets it look that up.

    372=              the question
    372=[372]         the model calls the tool
    372=[372]5        the tool replies; nothing but this program knows the number
    372=[372]5  5     the model answers, which earns 1

A model may also answer at once, and then must guess. It knows nothing of the trainer: its client could as well ask a
server of OpenAI's.
"""

from __future__ import annotations

import os
from typing import Any

ROOM = 6
"""Tokens of a call: the brackets, three digits, and the end."""


async def rollout(client: Any, problem: dict[str, Any]) -> dict[str, float]:
    """Ask the model about one article; return 1 if its answer is right."""
    prompt = f"{problem['article']}="
    answer = await complete(client, prompt)
    called = answer.startswith("[")
    if called:
        prompt += f"{answer}]{look_up(problem, answer[1:])}"
        answer = await complete(client, prompt)
    return {"reward": float(answer == str(problem["pieces"])), "called": called}


async def complete(client: Any, prompt: str) -> str:
    completion = await client.completions.create(
        model=os.environ["OPENAI_MODEL"], prompt=prompt, stop=["]"], max_tokens=ROOM
    )
    text: str = completion.choices[0].text
    return text


def look_up(problem: dict[str, Any], article: str) -> str:
    """Return the pieces of an article in stock; nothing for any other than the problem's."""
    return str(problem["pieces"]) if article == problem["article"] else ""
