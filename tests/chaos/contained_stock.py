"""The program of demo-program for an image that has Python alone: the same questions, calls and rewards."""

from __future__ import annotations

import json
import os
import sys
import urllib.request


def complete(prompt: str) -> str:
    asked = {"model": os.environ["OPENAI_MODEL"], "prompt": prompt, "stop": ["]"], "max_tokens": 6}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/completions",
        json.dumps(asked).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


problem = json.load(sys.stdin)
prompt = f"{problem['article']}="
answer = complete(prompt)
called = answer.startswith("[")
if called:
    found = problem["pieces"] if answer[1:] == problem["article"] else ""
    answer = complete(f"{prompt}{answer}]{found}")
json.dump({"reward": float(answer == str(problem["pieces"])), "called": called}, sys.stdout)
