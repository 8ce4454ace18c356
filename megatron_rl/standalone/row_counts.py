"""Counts over all rows or problems of a recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from megatron_rl.agent.api import TrainingSet
from megatron_rl.standalone.first_rows import Lesson
from megatron_rl.supervised.rows import RowEncoder, UnusableRow

PERCENTILES = (50, 90, 99, 100)


def counts(lesson: Lesson) -> Iterator[dict[str, Any]]:
    """Yield the counts of each set: `rows`; `dropped`, their number by reason; `lengths`, in tokens by percentile;
    `limit`, the longest that is trained on; `equal`, rows that repeat an earlier one, and `equal_prompts`; for rows of
    data `learned`, the share of their tokens."""
    for each in lesson.sets:
        yield _of_rows(lesson, each) if lesson.config.supervised else _of_problems(lesson, each)


def _of_rows(lesson: Lesson, of: TrainingSet) -> dict[str, Any]:
    encoder = RowEncoder(lesson.config.rows, lesson.tokenizer, lesson.config.sequence_length)
    dropped: Counter[str] = Counter(lesson.unread)
    lengths: list[int] = []
    learned = 0
    whole: Counter[Hashable] = Counter()
    prompts: Counter[Hashable] = Counter()
    for row in of.problems:
        try:
            example = encoder.example(row)
        except UnusableRow as error:
            dropped[str(error)] += 1
            continue
        lengths.append(len(example.tokens))
        learned += sum(example.loss_mask)
        whole[(*example.tokens,)] += 1
        prompts[(*example.tokens[: example.loss_mask.index(True)],)] += 1
    return {
        "set": lesson.config.rows.path or lesson.config.task.name,
        "rows": len(of.problems) + sum(lesson.unread.values()),
        "dropped": dict(dropped.most_common()),
        "lengths": percentiles(lengths),
        "limit": lesson.config.sequence_length,
        "equal": repeats(whole),
        "equal_prompts": repeats(prompts),
        "learned": learned / sum(lengths) if lengths else None,
    }


def _of_problems(lesson: Lesson, of: TrainingSet) -> dict[str, Any]:
    limit = lesson.config.sequence_length - lesson.config.sampling.max_new_tokens
    dropped: Counter[str] = Counter()
    lengths: list[int] = []
    prompts: Counter[Hashable] = Counter()
    for problem in of.problems:
        prompts[problem.prompt] += 1
        if not problem.is_prompt:
            continue
        try:
            length = len(lesson.tokenizer.encode(problem.prompt))
        except ValueError as error:
            dropped[str(error)] += 1
            continue
        lengths.append(length)
        if length > limit:
            dropped["its prompt leaves no room for an answer"] += 1
    return {
        "set": of.environment or lesson.config.task.name,
        "rows": len(of.problems),
        "dropped": dict(dropped.most_common()),
        "lengths": percentiles(lengths),
        "limit": limit,
        "equal": repeats(prompts),
        "equal_prompts": repeats(prompts),
    }


def percentiles(lengths: Sequence[int]) -> dict[str, int]:
    """Return the lengths at PERCENTILES, the largest as the last; empty without lengths."""
    ordered = sorted(lengths)
    return {str(part): ordered[max(0, -(-part * len(ordered) // 100) - 1)] for part in PERCENTILES if ordered}


def repeats(seen: Counter[Hashable]) -> int:
    """Return the number of values that equal an earlier one."""
    return seen.total() - len(seen)
