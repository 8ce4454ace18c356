"""Trial of an environment without a model: the rewards of a right and of a wrong answer to its first problems."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from megatron_rl.agent.api import Environment, GroupRolloutRequest
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.generate.engine.scripted import ScriptedInference
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.inference import Sampling


class CodePoints:
    vocab_size, eos_id, end_ids = 0x110001, 0x110000, frozenset({0x110000})
    chat_template: str | None = None
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
    ) -> str | None:
        return None

    def mark(self, value: Any) -> Any:
        return value


def first_problems(environment: Environment, config: EnvironmentConfig, count: int) -> list[Problem]:
    """Return the first problems, preferably training problems. Raises ValueError if there are none."""
    sets = [environment.training_problems(), *environment.evaluation_problems().values()]
    chosen = [*islice(next(filter(None, sets), []), count)]
    if not chosen:
        raise ValueError(f"environment {config.name!r} has no problems")
    return chosen


def try_answers(
    environment: Environment, config: EnvironmentConfig, problems: Iterable[Problem], tokenizer: Tokenizer | None = None
) -> Iterator[dict[str, Any]]:
    """Yield `prompt`, `gold` and `wrong`, two answers, and `gold_reward` and `wrong_reward` of each problem. The reward
    of a lost answer is None, and `failures` has the reason; `no_gold` says why no right answer is known, or why the
    tokenizer cannot write it. `traces`, by reason, and `output`, what the code of the task printed, are there if they
    are not empty.

    tokenizer: that of the environment; default: CodePoints.
    """
    tokenizer = tokenizer or CodePoints()
    with asyncio.Runner() as runner:
        for problem in problems:
            found: dict[str, Any] = {"prompt": problem.prompt, "gold_reward": None}
            failures: list[str] = []
            printed: list[str] = []
            try:
                gold = found["gold"] = environment.gold_response(problem)
                tokenizer.encode(gold)
            except (NotImplementedError, ValueError) as error:
                found["no_gold"] = str(error)
            else:
                answered = runner.run(scored_answer(environment, config, problem, gold, tokenizer))
                found["gold_reward"], failures = reward_of(answered), [*answered.failures]
                printed += [one.output for one in answered.trajectories]
            wrong = found["wrong"] = wrong_answer(environment, problem, tokenizer)
            answered = runner.run(scored_answer(environment, config, problem, wrong, tokenizer))
            found["wrong_reward"], failures = reward_of(answered), [*failures, *answered.failures]
            printed += [one.output for one in answered.trajectories]
            traces = traces_of(environment, failures)
            more = {"failures": failures, "traces": traces, "output": "".join(printed)}
            yield {**found, **{name: value for name, value in more.items() if value}}


def traces_of(environment: Environment, failures: Iterable[str]) -> dict[str, str]:
    return {
        reason: trace
        for reason in failures
        for kind, trace in environment.tracebacks().items()
        if trace and reason.startswith(kind[: len(reason)])
    }


def wrong_answer(environment: Environment, problem: Problem, tokenizer: Tokenizer) -> str:
    text = environment.wrong_response(problem)
    try:
        tokenizer.encode(text)
    except ValueError:
        return ""
    return text


def reward_of(answered: TrajectoryGroup) -> float | None:
    return answered.trajectories[0].reward if answered.trajectories else None


async def scored_answer(
    environment: Environment, config: EnvironmentConfig, problem: Problem, text: str, tokenizer: Tokenizer
) -> TrajectoryGroup:
    """Score an answer as in a run; the group is empty if it is lost."""
    request = GroupRolloutRequest(
        ordinal=0,
        problem=problem,
        group_size=1,
        sampling=Sampling(max_new_tokens=len(tokenizer.encode(text)) + 1),
        key=0,
        inference=ScriptedInference(tokenizer, [text]),
        limits=RolloutLimits.of(config),
    )
    return await environment.group_rollout(request)
