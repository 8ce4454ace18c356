"""Two agents that are one model: a solver answers, and a critic judges the answer. Each has its own rewards.

Every call of the model is a turn. The program reports a reward for each, in the order of the calls, with the name of
its agent, so that solvers are compared with solvers and critics with critics.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from openai import OpenAI


def main() -> None:
    problem = json.loads(sys.stdin.readline())
    client = OpenAI(timeout=None)

    def ask(messages: list[Any]) -> str:
        completion = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
        return (completion.choices[0].message.content or "").strip()

    def is_right(answer: str) -> bool:
        return answer.rstrip(".").rpartition(" ")[2] == str(problem["answer"])

    task: list[Any] = [{"role": "user", "content": problem["prompt"]}]
    answer = ask(task)
    judged = ask([{"role": "user", "content": f"{problem['prompt']}\nAnswer: {answer}\nIs this right? Say yes or no."}])
    accepted = "yes" in judged.lower()
    turns = [
        {"agent": "solver", "reward": float(is_right(answer) and accepted)},
        {"agent": "critic", "reward": float(accepted == is_right(answer))},
    ]
    if not accepted:
        task += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "A critic doubts it. Try again."},
        ]
        answer = ask(task)
        turns.append({"agent": "solver", "reward": float(is_right(answer))})
    print(json.dumps({"reward": float(is_right(answer)), "accepted": accepted, "turn_rewards": turns}))


main()
