"""Sums that grow turn by turn. The model is asked for a sum of two digits, then to add a further digit to it, and so
on. The reward is the share of right answers.

    pip install -e examples/verifiers/running_sum
    mrl-submit demo environment='{name: verifiers/running-sum}'    # or any other trainer of verifiers
"""

from __future__ import annotations

import random
import re

import verifiers.v1 as vf

__all__ = ["RunningSumEnv", "RunningSumTaskset"]


class RunningSumData(vf.TaskData):
    digits: list[int]
    """The first two are asked for together, each further one in its own turn."""


class RunningSumConfig(vf.TasksetConfig):
    split: str = "train"
    """train or test: different sums."""
    num_tasks: int = 200
    turns: int = 2


class RunningSumTask(vf.Task[RunningSumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Share of the turns whose last number is the sum so far."""
        digits = self.data.digits
        sums = [sum(digits[: count + 2]) for count in range(len(digits) - 1)]
        answers = [re.findall(r"-?\d+", message.content or "") for message in trace.assistant_messages]
        right = [found[-1:] == [str(total)] for found, total in zip(answers, sums, strict=False)]
        return sum(right) / len(sums)


class RunningSumTaskset(vf.Taskset[RunningSumTask, RunningSumConfig]):
    def load(self) -> list[RunningSumTask]:
        config, draw = self.config, random.Random(self.config.split)
        return [self._task([draw.randint(1, 9) for _ in range(config.turns + 1)]) for _ in range(config.num_tasks)]

    def _task(self, digits: list[int]) -> RunningSumTask:
        prompt = f"{digits[0]} + {digits[1]} = ? Reply with the number only."
        return RunningSumTask(RunningSumData(prompt=prompt, digits=digits), self.config.task)


class RunningSumEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class RunningSumEnv(vf.Env[RunningSumEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as conversation:
            segment = await conversation.turn()
            for digit in task.data.digits[2:]:
                if segment.terminated:
                    return
                segment = await conversation.turn(f"Now add {digit}. Reply with the number only.")
