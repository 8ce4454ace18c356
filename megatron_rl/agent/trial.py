"""Test of an environment without a model: its first problems, and the rewards of a right and of a wrong answer.

    python -m megatron_rl.agent.trial < TRIAL.json

For `mrl environments try`. Writes a JSON object per problem to stdout, and errors to stderr in one line.
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
from megatron_rl.agent.registry import build_environment, with_samples
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_USAGE
from megatron_rl.inference.config import Sampling
from megatron_rl.inference.scripted import ScriptedInference
from megatron_rl.rank.world import die_with_parent
from megatron_rl.recipe.extras import install_command


class CodePoints:
    """Tokenizer that encodes any text without files: a token is a code point."""

    vocab_size, eos_id, end_ids, chat_template = 0x110001, 0x110000, frozenset({0x110000}), None
    renderer = "auto"

    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]

    encode_prompt = encode

    def as_prompt(self, text: str) -> str:
        return text

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return "".join(self.show(token) for token in tokens if special or token != self.eos_id)

    def show(self, token: int) -> str:
        return "<end>" if token == self.eos_id else chr(token)

    def token_bytes(self, token: int) -> bytes:
        return self.show(token).encode()

    def is_special(self, token: int) -> bool:
        return token == self.eos_id

    def conversation(
        self, messages: Any, tools: Any = None, variables: Any = None, *, add_generation_prompt: bool = True
    ) -> None:
        return None

    def mark(self, value: Any) -> Any:
        return value


def main() -> int:
    die_with_parent()
    logging.basicConfig(level=logging.ERROR, format="%(message)s", stream=sys.stderr)
    request = json.loads(sys.stdin.read())
    output, sys.stdout = sys.stdout, sys.stderr  # keep an environment's own prints out of the output
    try:
        for found in try_environment(EnvironmentConfig(**request["environment"]), request["problems"]):
            output.write(json.dumps(found) + "\n")
            output.flush()
    except ValueError as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return EXIT_USAGE
    except ImportError as error:
        brought = f"; `{install_command('train')}` installs what the environments of mrl import"
        sys.stderr.write(f"environment {request['environment']['name']}: {error}{brought}\n")
        return EXIT_USAGE
    return EXIT_FINISHED


def try_environment(config: EnvironmentConfig, problems: int) -> Iterator[dict[str, Any]]:
    """Yield `prompt`, `gold_reward` and `wrong_reward` of the first problems, preferably of training problems. The
    reward of a lost answer is None, and `failures` has the reason; `no_gold` says why no right answer is known.

    config: its arguments override the environment's sample arguments.

    Raises ValueError if the environment cannot be built or has no problems.
    """
    environment = build_environment(with_samples(config), CodePoints())
    sets = [environment.training_problems(), *environment.evaluation_problems().values()]
    chosen = [*islice(next(filter(None, sets), []), problems)]
    if not chosen:
        raise ValueError(f"environment {config.name!r} has no problems")
    with asyncio.Runner() as runner:
        for problem in chosen:
            found: dict[str, Any] = {"prompt": problem.prompt, "gold_reward": None}
            failures: list[str] = []
            try:
                gold = environment.gold_response(problem)
            except NotImplementedError as error:
                found["no_gold"] = str(error)
            else:
                found["gold_reward"], failures = runner.run(_reward(environment, config, problem, gold))
            wrong = environment.wrong_response(problem)
            found["wrong_reward"], more = runner.run(_reward(environment, config, problem, wrong))
            yield {**found, **({"failures": [*failures, *more]} if failures or more else {})}


async def _reward(
    environment: Environment, config: EnvironmentConfig, problem: Problem, text: str
) -> tuple[float | None, list[str]]:
    """Score an answer as in a run; return the reward, None if the answer is lost, and the reasons."""
    request = GroupRolloutRequest(
        ordinal=0,
        problem=problem,
        group_size=1,
        sampling=Sampling(max_new_tokens=len(text) + 1),
        key=0,
        inference=ScriptedInference(CodePoints(), [text]),
        limits=RolloutLimits.of(config),
    )
    group = await environment.group_rollout(request)
    return (group.trajectories[0].reward if group.trajectories else None), [*group.failures]


if __name__ == "__main__":
    sys.exit(main())
