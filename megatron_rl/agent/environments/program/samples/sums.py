"""A program that asks the model once, with the standard library alone.

It reads one problem from standard input and prints the reward.
"""

from __future__ import annotations

import json
import os
import sys
from urllib.request import Request, urlopen

problem = json.load(sys.stdin)
request = Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(
        {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": problem["prompt"]}]}
    ).encode(),
    {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
)
with urlopen(request) as response:
    message = json.load(response)["choices"][0]["message"]
answer = message["content"] or ""
sys.stdout.write(f"the model answers {answer!r}\n")
sys.stdout.write(json.dumps({"reward": float(problem["answer"] in answer.split()), "length": len(answer)}) + "\n")
