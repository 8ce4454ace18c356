"""An environment tried out without a model: its first problems, and the rewards of a right and of a wrong answer.

    python -m megatron_rl.agent.trial < TRIAL.json

For `mrl environments try`. Says what it found on stdout, a JSON object a problem, and what is wrong on stderr, in one
line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from megatron_rl.agent.api import Environment, GroupRolloutRequest
from megatron_rl.agent.config import EnvironmentConfig
from megatron_rl.agent.registry import build_environment, environment_class
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_USAGE
from megatron_rl.inference.config import Sampling
from megatron_rl.inference.scripted import ScriptedInference
from megatron_rl.rank.world import die_with_parent


class CodePoints:
    """A tokenizer that knows every text and needs no file: a token is a character."""

    vocab_size, eos_id, end_ids, chat_template = 0x110001, 0x110000, frozenset({0x110000}), None

    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token != self.eos_id)

    def show(self, token: int) -> str:
        return "<end>" if token == self.eos_id else chr(token)

    def chat(self, message: str) -> None:
        return None

    def conversation(self, messages: Any, tools: Any = None) -> None:
        return None


def main() -> int:
    """The exit code."""
    die_with_parent()
    logging.basicConfig(level=logging.ERROR, format="%(message)s", stream=sys.stderr)
    asked = json.loads(sys.stdin.read())
    try:
        for found in tried(EnvironmentConfig(name=asked["name"], args=asked["args"]), asked["problems"]):
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
    except (NotImplementedError, ValueError) as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return EXIT_USAGE
    return EXIT_FINISHED


def tried(config: EnvironmentConfig, problems: int) -> Iterator[dict[str, Any]]:
    """`prompt`, `gold_reward` and `wrong_reward` of the first problems, those to train on if there are any. Of a lost
    answer the reward is None, and `failures` says why.

    config: its arguments are laid over those with which the environment has problems anywhere.

    Raises ValueError where it cannot be built or has no problems, NotImplementedError where it has no right answers.
    """
    samples = environment_class(config.name).sample_arguments()
    environment = build_environment(config.model_copy(update={"args": {**samples, **config.args}}), CodePoints())
    sets = [environment.training_problems(), *environment.evaluation_problems().values()]
    chosen = [*islice(next(filter(None, sets), []), problems)]
    if not chosen:
        raise ValueError(f"environment {config.name!r} has no problems")
    with asyncio.Runner() as runner:
        for problem in chosen:
            gold, wrong = (
                runner.run(_scored(environment, config, problem, response))
                for response in (environment.gold_response(problem), environment.wrong_response(problem))
            )
            failures = [*gold.failures, *wrong.failures]
            yield {
                "prompt": problem.prompt,
                "gold_reward": _reward(gold),
                "wrong_reward": _reward(wrong),
                **({"failures": failures} if failures else {}),
            }


async def _scored(environment: Environment, config: EnvironmentConfig, problem: Problem, text: str) -> TrajectoryGroup:
    """An answer by the way that it takes in a run."""
    request = GroupRolloutRequest(
        ordinal=0,
        problem=problem,
        group_size=1,
        sampling=Sampling(max_new_tokens=len(text) + 1),
        key=0,
        inference=ScriptedInference(CodePoints(), [text]),
        reward_timeout_s=config.reward_timeout_s,
    )
    return await environment.group_rollout(request)


def _reward(group: TrajectoryGroup) -> float | None:
    """None where the answer was lost."""
    return group.trajectories[0].reward if group.trajectories else None


if __name__ == "__main__":
    sys.exit(main())
