"""The record of what a run is taught: counts over its prompts, and the rewards of right answers.

It is written before the first step, by the code that the steps use: the same environment, loop and limits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice, takewhile

import torch
import torch.distributed as dist

from megatron_rl.agent.api import Environment
from megatron_rl.agent.scripted_trial import scored_answer
from megatron_rl.agent.trajectories import Problem
from megatron_rl.algorithms.answers import accuracy_of, with_components
from megatron_rl.contract.records import ABSENT, read, write
from megatron_rl.contract.run_records import SHOWN, LessonRecord, PromptCounts, RightAnswer
from megatron_rl.learn.rollout.agent_loop import AgentLoop
from megatron_rl.learn.rollout.evaluation import scoring_progress
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.rank.here import Here
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.environment_section import member_of
from megatron_rl.run.standalone.first_rows import Lesson

MOST_COUNTED = 20_000  # prompts that are counted, at most: these take a fraction of a second
TRIED = 8  # problems whose right answer is scored
TRIAL_S = 60.0  # seconds for these scores together. Answers that are not scored by then count as lost

logger = logging.getLogger("megatron_rl")


def record_lesson(here: Here, lesson: Lesson, environment: Environment | None, loop: AgentLoop | None) -> None:
    """Write lesson.json unless it exists. Collective. A file that cannot be written is left out with a warning.

    environment, loop: None if nothing is scored. Raises LeaveAgreed if a rank is asked to leave.
    """
    run_dir, safe_points, sets = here.run_dir, here.safe_points, lesson.sets
    leads = dist.get_rank() == 0
    missing = torch.tensor([leads and read(LessonRecord, run_dir.lesson) is ABSENT], dtype=torch.int32)
    if not safe_points.maximum(missing).item():
        return
    right: list[RightAnswer] = []
    if environment is not None and loop is not None:
        first = [*islice((problem for each in sets for problem in each.problems), TRIED)]
        own = first if loop.role.drives and loop.role.index == 0 else []
        work = partial(right_answers, environment, own, lesson.tokenizer, lesson.config)
        with safe_points.phase("evaluate"):
            right = loop.run(work, partial(scoring_progress, environment, len(first))) or []
    if not leads:
        return
    texts = islice((problem.prompt for each in sets for problem in each.problems), MOST_COUNTED)
    try:
        write(run_dir.lesson, LessonRecord(count_prompts(texts), right), durable=False)
    except OSError as error:
        logger.warning("the record of the lesson is left out: %s", error)


async def right_answers(
    environment: Environment, problems: Sequence[Problem], tokenizer: Tokenizer, config: RunConfig
) -> list[RightAnswer]:
    """Score the right answer to each problem whose environment knows one, within TRIAL_S."""
    asked = [(problem, answer) for problem in problems if (answer := right_answer(environment, problem)) is not None]
    tasks = [asyncio.ensure_future(_score(environment, *pair, tokenizer, config)) for pair in asked]
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=TRIAL_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    found = []
    for (problem, answer), task in zip(asked, tasks, strict=True):
        reward, why = (None, f"it took longer than {TRIAL_S:g} s") if task.cancelled() else task.result()
        found.append(RightAnswer(problem.prompt[:SHOWN], answer[:SHOWN], reward, why))
    return found


def right_answer(environment: Environment | None, problem: Problem) -> str | None:
    """Return the right answer to a problem, as a model would write it; None where the environment knows none."""
    try:
        return None if environment is None else environment.gold_response(problem)
    except Exception:  # noqa: BLE001 - the environment's own code; a run does not depend on right answers
        return None


async def _score(
    environment: Environment, problem: Problem, answer: str, tokenizer: Tokenizer, config: RunConfig
) -> tuple[float | None, str]:
    """Return how right an answer is, scored as in a step; None and the reason if it is lost."""
    keys = member_of(config.task, problem.environment)
    try:
        answered = await scored_answer(environment, config.task, problem, answer, tokenizer)
    except Exception as error:  # noqa: BLE001 - the environment's own code
        return None, f"{type(error).__name__}: {error}"[:SHOWN]
    answered = with_components(answered, keys.components_of_accuracy)
    accuracies = [accuracy_of(one, keys) for one in answered.trajectories]
    return next(iter(accuracies), None), next(iter(answered.failures), "")[:SHOWN]


def count_prompts(prompts: Iterable[str]) -> PromptCounts:
    """Count prompts that are equal, empty or of the same length. What all prompts begin and end with, such as a chat
    template and its system message, does not count to their length."""
    count = Counter(prompts)
    texts = [*count]
    shortest = min(map(len, texts), default=0)
    shared = _shared(texts)
    shared += min(shortest - shared, _shared([text[::-1] for text in texts]))
    lengths = Counter(len(text) - shared for text in texts)
    longest = max(lengths, default=0)
    empty = sum(times for text, times in count.items() if len(text) == shared) if len(texts) > 1 else 0
    return PromptCounts(
        prompts=count.total(),
        distinct=len(texts),
        empty=empty,
        longest=longest,
        at_longest=lengths[longest],
        lengths=len(lengths),
        at_another=max((times for length, times in lengths.items() if length != longest), default=0),
    )


def _shared(texts: Sequence[str]) -> int:
    """Return the number of characters that all texts begin with."""
    pairs = zip(min(texts, default=""), max(texts, default=""), strict=False)  # those between have what both have
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
