"""Repetition of a recorded group, for `mrl replay`, in a separate process:

    python -m megatron_rl.run.standalone.replay < REPLAY.json

It scores the recorded answers with the environment's code of today, and samples the same prompt again with the random
numbers of the step. It writes JSON objects to stdout: {"scores": [...]}, one for each recorded answer, or {"unscored":
WHY}; then {"group": GroupLine}, with "programs": true if programs took part. Errors go to stderr in one line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import IO, Any, cast

from megatron_rl.agent.api import Environment, GroupRolloutRequest, build_environment
from megatron_rl.agent.keys import group_key
from megatron_rl.agent.problem_digest import name_of
from megatron_rl.agent.recorded_answers import RecordedAnswer
from megatron_rl.agent.scoring import CheckedReward, RolloutLimits
from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_USAGE
from megatron_rl.contract.manifest import CheckpointError
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.rollout_records import AnswerLine, GroupLine, group_json
from megatron_rl.contract.shapes import from_json
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.learn.rollout.record import answer_line, group_line
from megatron_rl.model.tokenizer import Tokenizer, build_tokenizer
from megatron_rl.rank.world import die_with_parent
from megatron_rl.recipe.config import RunConfig, read_config
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.requests import Replay


def main() -> int:
    die_with_parent()
    logging.basicConfig(level=logging.ERROR, format="%(message)s", stream=sys.stderr)
    output, sys.stdout = sys.stdout, sys.stderr  # keep an environment's own prints out of the output
    try:
        _replay(Replay.model_validate_json(sys.stdin.read()), output)
    except (ValueError, ConfigurationError, CheckpointError, ImportError) as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return EXIT_USAGE
    return EXIT_FINISHED


def _replay(asked: Replay, output: IO[str]) -> None:
    def say(**what: object) -> None:
        output.write(json.dumps(what) + "\n")
        output.flush()

    recorded = from_json(GroupLine, asked.group)
    config = read_config(RunDir(asked.run))
    tokenizer = build_tokenizer(config.tokenizer)
    environment = build_environment(config.task, tokenizer)
    with asyncio.Runner() as loop:
        try:
            problem = problem_of(environment, recorded)
            try:
                say(scores=loop.run(scores_now(environment, config, problem, recorded, tokenizer)))
            except NotImplementedError as error:
                say(unscored=str(error))
            if asked.checkpoint is None:
                return
            with _request(asked, asked.checkpoint, config, problem, recorded) as request:
                group = loop.run(environment.group_rollout(request))
            answers = [answer_line(each, repeat(0.0), tokenizer.token_bytes) for each in group.trajectories]
            again = group_line(recorded.step, group, [0.0] * len(answers), answers=answers)
            say(group=json.loads(group_json(again)), programs=not environment.agent_of(problem).repeatable)
        finally:
            loop.run(environment.close())


def problem_of(environment: Environment, recorded: GroupLine) -> Problem:
    """Return the problem of a recorded group. Raises ValueError if the environment no longer has it."""
    for one in environment.training_sets():
        for problem in one.problems:
            if problem.prompt.startswith(recorded.prompt) and name_of(problem) == recorded.problem:
                return problem
    raise ValueError(
        f"problem {recorded.problem} is no longer among the training problems: the data or the code that makes them "
        "has changed since"
    )


async def scores_now(
    environment: Environment, config: RunConfig, problem: Problem, recorded: GroupLine, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Score each recorded answer with the code of today: {"reward": ..., "components": {...}}, or {"lost": WHY}.

    Raises NotImplementedError for an environment that does not score answers itself.
    """
    limits, found = RolloutLimits.of(config.task), []
    for answer, reason in zip(recorded.answers, recorded.finish_reasons, strict=True):
        texts, end = _responses(answer, tokenizer), "length" if reason == "length" else "stop"
        given = RecordedAnswer(answer.sequences, texts, cast(FinishReason, end), config.sampling)
        score = await environment.rescore(problem, given, limits)
        if isinstance(score, CheckedReward):
            found.append({"reward": score.reward, "components": dict(score.components)})
        else:
            found.append({"lost": score})
    return found


def _responses(answer: AnswerLine, tokenizer: Tokenizer) -> list[str]:
    """Return the texts of the model's turns."""
    sequence = answer.sequences[0]
    return [tokenizer.decode(sequence.tokens[first:end]) for first, end in sequence.turns]


@contextmanager
def _request(
    asked: Replay, checkpoint: str, config: RunConfig, problem: Problem, recorded: GroupLine
) -> Iterator[GroupRolloutRequest]:
    """Open the weights, and yield the request that the driver made in the step."""
    # Imported here because it takes seconds.
    import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
    from megatron_rl.checkpoint.source import find_source
    from megatron_rl.generate.engine.opened_policy import open_policy

    source = find_source(checkpoint)
    with open_policy(source, device=asked.device, threads=asked.threads or config.job.threads_per_rank) as opened:
        yield GroupRolloutRequest(
            ordinal=recorded.ordinal,
            problem=problem,
            group_size=config.grpo.group_size,
            sampling=config.sampling,
            key=group_key(config.training.seed, recorded.ordinal, 0, recorded.begun_version),
            inference=opened.engine,
            limits=RolloutLimits.of(config.task),
        )


if __name__ == "__main__":
    sys.exit(main())
