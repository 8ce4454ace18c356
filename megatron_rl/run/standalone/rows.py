"""Rows of a recipe as they are trained, for `mrl rows` and for the check before a run starts:

    python -m megatron_rl.run.standalone.rows < REQUEST.json

REQUEST.json is a RowsRequest. Writes JSON objects to stdout, a line each: rows, problems, counts, or faults.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import Any

from megatron_rl.agent.api import Environment, TrainingSet
from megatron_rl.agent.data_rows import first_rows
from megatron_rl.agent.dropped_rows import CHECKED
from megatron_rl.agent.scripted_trial import try_answers
from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_USAGE
from megatron_rl.contract.paths import RunDir
from megatron_rl.learn.supervised.example_rows import RowEncoder, UnusableRow, place_of
from megatron_rl.model.chat.messages import Example
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.rank.world import die_with_parent
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.errors import ConfigurationError, task_location
from megatron_rl.recipe.own_code import kept
from megatron_rl.recipe.requests import RowsRequest
from megatron_rl.run.standalone.first_rows import Lesson, faults, open_lesson, unknown_end_of


def main() -> int:
    die_with_parent()
    logging.basicConfig(level=logging.ERROR, format="%(message)s", stream=sys.stderr)
    request = RowsRequest.model_validate_json(sys.stdin.read())
    output, sys.stdout = sys.stdout, sys.stderr  # keep prints of the user's code out of the output
    config = RunConfig.model_validate(request.recipe)
    copies = RunDir(request.copies) if request.copies else None
    try:
        for found in answers(request, config, copies):
            output.write(json.dumps(found) + "\n")
            output.flush()
    except (ValueError, ImportError) as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return EXIT_USAGE
    return EXIT_FINISHED


def answers(request: RowsRequest, config: RunConfig, copies: RunDir | None) -> Iterator[dict[str, Any]]:
    """Yield the answers to a request. Raises ValueError or ImportError where the rows cannot be read."""
    if request.purpose == "check":
        yield from _checked(config, copies, request.resumes)
    elif request.purpose == "count":
        with _warnings() as said:
            lesson = open_lesson(config, copies)
            yield from counts(lesson)
        yield from ({"warning": text} for text in _distinct(*said, unknown_end_of(lesson)))
    else:
        yield from shown(_opened(config, copies, request.first), request.first)


def _checked(config: RunConfig, copies: RunDir | None, resumes: bool) -> Iterator[dict[str, Any]]:
    """Yield each `fault`, a sentence; `certain`, whether the run would have it too; and `lacks`, the package whose
    absence causes it, where that is the reason. Before them each `warning` that the run would log."""
    try:
        with _warnings() as said:
            lesson = _opened(config, copies, CHECKED)
        yield from ({"warning": text} for text in _distinct(*said, unknown_end_of(lesson)))
        yield from ({"fault": fault.text, "certain": fault.certain} for fault in faults(lesson, resumes))
    except Exception as error:
        if not (isinstance(error, ValueError | ImportError) or task_location(error)):  # not the task's own code
            raise
        yield _fault(error)
    yield from _functions(config, copies)


def _distinct(*texts: str | None) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text is not None]


def _opened(config: RunConfig, copies: RunDir | None, wanted: int) -> Lesson:
    """Open a lesson of about the `wanted` first rows of each data set. Where these few are not enough, because they are
    held out, lack a column that later ones have, or are to be counted, it has all rows."""
    if not config.rows.counted:
        with suppress(ValueError), first_rows(CHECKED + 2 * wanted):
            lesson = open_lesson(config, copies)
            if all(each.problems for each in lesson.sets):
                return lesson
    return open_lesson(config, copies)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    said: list[str] = []

    class WarningCollector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    ours, collector = logging.getLogger("megatron_rl"), WarningCollector(logging.WARNING)
    level, propagates = ours.level, ours.propagate
    ours.setLevel(logging.WARNING)  # `main` logs errors only
    ours.propagate = False
    ours.addHandler(collector)
    try:
        yield said
    finally:
        ours.removeHandler(collector)
        ours.setLevel(level)
        ours.propagate = propagates


def _fault(error: Exception) -> dict[str, Any]:
    text = str(error) if isinstance(error, ValueError | ImportError) else f"{type(error).__name__}: {error}"
    place = task_location(error)
    if place and place.partition(": ")[0] not in text:
        text += f" ({place})"
    return {"fault": text, "certain": True, "lacks": _lacking(error)}


def _lacking(error: BaseException) -> str | None:
    """Return the name of the package that an import lacked, among the causes of an error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ImportError):
            return cause.name or ""
        cause = cause.__cause__
    return None


def _functions(config: RunConfig, copies: RunDir | None) -> Iterator[dict[str, Any]]:
    """Import the user's loss and baseline functions and call each with a tiny batch."""
    functions = config.grpo.own_functions
    if not functions or config.supervised:
        return
    try:
        # Imported here because it takes seconds.
        from megatron_rl.algorithms.own_functions import own_baseline, own_policy_loss
    except ImportError as error:
        yield _fault(error)
        return
    checks = {"policy_loss": own_policy_loss, "baseline": own_baseline}
    changed = {key: kept(function, copies) if copies else function for key, function in functions.items()}
    grpo = config.grpo.model_copy(update=changed)
    for key in functions:
        try:
            checks[key](grpo)
        except ConfigurationError as error:
            yield _fault(error)


def shown(lesson: Lesson, count: int) -> Iterator[dict[str, Any]]:
    """Yield the first rows or problems of each set, and before the rows of one `ignored`, its columns that nothing
    reads, where it has some.

    A row has `row`, its number, `set`, empty if there is only one, `where`, its location, and `spans`, each the text of
    consecutive tokens that are all `learned` or all not; or `dropped`, the reason. A problem has `problem`, its number,
    `set`, and `prompt`, the text of the tokens; with an environment of answers also what `try_answers` yields; for a
    program `line`, which it reads.
    """
    if lesson.config.supervised:
        encoder = RowEncoder(lesson.config.rows, lesson.tokenizer, lesson.config.sequence_length)
        assert lesson.rows is not None
        for each in lesson.sets:
            if ignored := lesson.rows.ignored[each.environment]:
                yield {"set": each.environment, "ignored": [*ignored]}
            for number, row in enumerate(each.problems[:count], 1):
                where = {"row": number, "set": each.environment, "where": place_of(row, number - 1)}
                yield {**where, **_row(encoder, row, lesson.tokenizer)}
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
        yield {
            "learned": learned,
            "tokens": end - place,
            "text": tokenizer.decode(example.tokens[place:end], special=True),
        }
        place = end


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
        yield {**found, **next(tried), "prompt": lesson.tokenizer.decode(tokens, special=True)}


PERCENTILES = (50, 90, 99, 100)


def counts(lesson: Lesson) -> Iterator[dict[str, Any]]:
    """Yield the counts of each set: `rows`; `dropped`, their number by reason; `lengths`, in tokens by percentile;
    `limit`, the longest that is trained on; `equal`, rows that repeat an earlier one, and `equal_prompts`; for rows of
    data `ignored`, the columns that nothing reads, `learned`, the share of their tokens, `held_out`, the rows that
    evaluations read, and in a run of several sets `share`, that of the run's rows, and `steps`, which all epochs fill,
    or None."""
    for each in lesson.sets:
        yield _of_rows(lesson, each) if lesson.config.supervised else _of_problems(lesson, each)


def _of_rows(lesson: Lesson, of: TrainingSet) -> dict[str, Any]:
    config, rows = lesson.config, lesson.rows
    assert rows is not None
    encoder, unread = RowEncoder(config.rows, lesson.tokenizer, config.sequence_length), rows.unread[of.environment]
    its, held_out = config.rows.members[of.environment], len(rows.held_out.get(of.environment, ()))
    dropped: Counter[str] = Counter(unread)
    examples: list[Example] = []
    for row in of.problems:
        try:
            examples.append(encoder.example(row))
        except UnusableRow as error:
            dropped[str(error)] += 1
    lengths, learned = [len(each.tokens) for each in examples], sum(sum(each.loss_mask) for each in examples)
    whole = [(*each.tokens,) for each in examples]
    prompts = [tokens[: each.loss_mask.index(True)] for tokens, each in zip(whole, examples, strict=True)]
    return {
        "set": of.environment or config.rows.path or config.task.name,
        "rows": len(of.problems) + sum(unread.values()) + held_out * bool(its.held_out_share),
        **_measured(dropped, lengths, config.sequence_length, whole, prompts),
        "ignored": [*rows.ignored[of.environment]],
        "learned": learned / sum(lengths) if lengths else None,
        "held_out": held_out,
        "share": of.weight / sum(each.weight for each in lesson.sets),
        "steps": -(-rows.total // config.rows.examples_per_step) if rows.total else None,
    }


def _of_problems(lesson: Lesson, of: TrainingSet) -> dict[str, Any]:
    limit = lesson.config.sequence_length - lesson.config.sampling.max_new_tokens
    dropped: Counter[str] = Counter()
    lengths: list[int] = []
    for problem in (each for each in of.problems if each.is_prompt):
        try:
            lengths.append(len(lesson.tokenizer.encode(problem.prompt)))
        except ValueError as error:
            dropped[str(error)] += 1
    if long := sum(length > limit for length in lengths):
        dropped["its prompt leaves no room for an answer"] = long
    prompts = [problem.prompt for problem in of.problems]
    found = {"set": of.environment or lesson.config.task.name, "rows": len(of.problems)}
    return found | _measured(dropped, lengths, limit, prompts, prompts)


def _measured(
    dropped: Counter[str], lengths: list[int], limit: int, whole: Sequence[Hashable], prompts: Sequence[Hashable]
) -> dict[str, Any]:
    ordered = sorted(lengths)
    at = {str(part): ordered[max(0, -(-part * len(ordered) // 100) - 1)] for part in PERCENTILES if ordered}
    return {
        "dropped": dict(dropped.most_common()),
        "lengths": at,
        "limit": limit,
        "equal": len(whole) - len({*whole}),
        "equal_prompts": len(prompts) - len({*prompts}),
    }


if __name__ == "__main__":
    sys.exit(main())
