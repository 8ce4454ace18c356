"""The agent program sums. Each run of it is one rollout, on one problem of problems.jsonl."""

import json
import os
import sys

from openai import OpenAI

MODEL = os.environ["OPENAI_MODEL"]


def main() -> None:
    """Ask for a sum, and once more if the answer is wrong."""
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY name the model in training
    problem = json.loads(sys.stdin.readline())
    messages = [{"role": "user", "content": problem["prompt"]}]
    for attempt in (1, 2):
        choice = client.chat.completions.create(model=MODEL, messages=messages).choices[0]
        answer = choice.message.content or ""
        if answer.strip() == problem["answer"]:
            break
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "This is wrong. Reply with the number only."},
        ]
    right = answer.strip() == problem["answer"]
    # The last line is the reward; other numbers are metrics. What is printed before is kept with the rollout.
    print(json.dumps({"reward": right / attempt, "attempts": attempt}))


main()
