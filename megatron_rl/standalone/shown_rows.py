"""The first rows or problems of a recipe, as the model sees them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from megatron_rl.agent.api import Environment
from megatron_rl.agent.scripted_trial import try_answers
from megatron_rl.agent.trajectories import Problem
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.standalone.first_rows import Lesson
from megatron_rl.supervised.rows import Example, RowEncoder, UnusableRow, place_of


def shown(lesson: Lesson, count: int) -> Iterator[dict[str, Any]]:
    """Yield the first rows or problems of each set.

    A row has `row`, its number, `where`, its location, and `spans`, each the text of consecutive tokens that are all
    `learned` or all not; or `dropped`, the reason. A problem has `problem`, its number, `set`, and `prompt`, the text
    of the tokens; with an environment of answers also what `try_answers` yields; for a program `line`, which it reads.
    """
    if lesson.config.supervised:
        encoder = RowEncoder(lesson.config.rows, lesson.tokenizer, lesson.config.sequence_length)
        rows = [row for each in lesson.sets for row in each.problems]
        for number, row in enumerate(rows[:count], 1):
            yield {"row": number, "where": place_of(row, number - 1), **_row(encoder, row, lesson.tokenizer)}
        return
    assert lesson.environment is not None  # the recipe has rows or an environment
    yield from _problems(lesson, lesson.environment, count)


def _row(encoder: RowEncoder, row: Problem, tokenizer: Tokenizer) -> dict[str, Any]:
    try:
        example = encoder.example(row)
    except UnusableRow as error:
        return {"dropped": str(error), "text": row.prompt}
    learned = sum(example.loss_mask)
    return {"tokens": len(example.tokens), "learned": learned, "spans": [*spans(example, tokenizer)]}


def spans(example: Example, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield the runs of tokens that are learned, and those between them."""
    place = 0
    for learned, run in groupby(example.loss_mask):
        end = place + len([*run])
        yield {"learned": learned, "tokens": end - place, "text": text_of(example.tokens[place:end], tokenizer)}
        place = end


def text_of(tokens: list[int], tokenizer: Tokenizer) -> str:
    """Return the text of tokens, with the names of control tokens."""
    return tokenizer.decode(tokens, special=True)


def _problems(lesson: Lesson, environment: Environment, count: int) -> Iterator[dict[str, Any]]:
    config = lesson.config
    room = config.sequence_length - config.sampling.max_new_tokens
    chosen = [
        (number, each.environment or config.task.name, problem)
        for each in lesson.sets
        for number, problem in enumerate(each.problems[:count], 1)
    ]
    tried = try_answers(environment, config.task, [one for *_, one in chosen if one.is_prompt], lesson.tokenizer)
    for number, name, problem in chosen:
        found = {"problem": number, "set": name}
        if not problem.is_prompt:
            yield {**found, "line": dict(problem.golden)}
            continue
        tokens = lesson.tokenizer.encode(problem.prompt)
        found |= {"tokens": len(tokens), "room": room}
        yield {**found, **next(tried), "prompt": text_of(tokens, lesson.tokenizer)}
