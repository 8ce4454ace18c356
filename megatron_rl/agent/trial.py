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
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from megatron_rl.agent.api import Environment, GroupRolloutRequest
from megatron_rl.agent.config import EnvironmentConfig
from megatron_rl.agent.registry import build_environment, with_samples
from megatron_rl.agent.scoring import Patience
from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_USAGE
from megatron_rl.inference.config import Sampling
from megatron_rl.inference.scripted import ScriptedInference
from megatron_rl.rank.world import die_with_parent


class CodePoints:
    """A tokenizer that knows every text and needs no file: a token is a character."""

    vocab_size, eos_id, end_ids, chat_template = 0x110001, 0x110000, frozenset({0x110000}), None

    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]

    encode_prompt = encode

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token != self.eos_id)

    def show(self, token: int) -> str:
        return "<end>" if token == self.eos_id else chr(token)

    def conversation(self, messages: Any, tools: Any = None, variables: Any = None) -> None:
        return None


def main() -> int:
    """The exit code."""
    die_with_parent()
    logging.basicConfig(level=logging.ERROR, format="%(message)s", stream=sys.stderr)
    asked = json.loads(sys.stdin.read())
    told, sys.stdout = sys.stdout, sys.stderr  # what an environment prints is none of what it was asked
    try:
        for found in tried(EnvironmentConfig(**asked["environment"]), asked["problems"]):
            told.write(json.dumps(found) + "\n")
            told.flush()
    except ValueError as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return EXIT_USAGE
    return EXIT_FINISHED


def tried(config: EnvironmentConfig, problems: int) -> Iterator[dict[str, Any]]:
    """`prompt`, `gold_reward` and `wrong_reward` of the first problems, those to train on if there are any. Where an
    answer is lost or there is none the reward is None, and `failures` says why.

    config: its arguments are laid over those with which the environment has problems anywhere.

    Raises ValueError where it cannot be built or has no problems.
    """
    environment = build_environment(with_samples(config), CodePoints())
    sets = [environment.training_problems(), *environment.evaluation_problems().values()]
    chosen = [*islice(next(filter(None, sets), []), problems)]
    if not chosen:
        raise ValueError(f"environment {config.name!r} has no problems")
    with asyncio.Runner() as runner:
        for problem in chosen:
            gold, gold_failures = runner.run(_reward(environment, config, problem, environment.gold_response))
            wrong, wrong_failures = runner.run(_reward(environment, config, problem, environment.wrong_response))
            failures = [*gold_failures, *wrong_failures]
            yield {
                "prompt": problem.prompt,
                "gold_reward": gold,
                "wrong_reward": wrong,
                **({"failures": failures} if failures else {}),
            }


async def _reward(
    environment: Environment, config: EnvironmentConfig, problem: Problem, response: Callable[[Problem], str]
) -> tuple[float | None, list[str]]:
    """Of an answer by the way that it takes in a run; None where there is none, and why."""
    try:
        text = response(problem)
    except NotImplementedError as error:
        return None, [str(error)]
    request = GroupRolloutRequest(
        ordinal=0,
        problem=problem,
        group_size=1,
        sampling=Sampling(max_new_tokens=len(text) + 1),
        key=0,
        inference=ScriptedInference(CodePoints(), [text]),
        patience=Patience.of(config),
    )
    group = await environment.group_rollout(request)
    return (group.trajectories[0].reward if group.trajectories else None), [*group.failures]


if __name__ == "__main__":
    sys.exit(main())
