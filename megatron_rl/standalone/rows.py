"""Rows of a recipe as they are trained, for `mrl rows` and for the check before a run starts:

    python -m megatron_rl.standalone.rows < REQUEST.json

REQUEST.json is a RowsRequest. Writes JSON objects to stdout, a line each: rows, problems, counts, or faults.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from megatron_rl.agent.dropped_rows import CHECKED
from megatron_rl.agent.row_limit import first_rows
from megatron_rl.config import RunConfig
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_USAGE
from megatron_rl.contract.paths import RunDir
from megatron_rl.errors import ConfigurationError, task_location
from megatron_rl.rank.world import die_with_parent
from megatron_rl.recipe.own_code import kept
from megatron_rl.standalone.config import RowsRequest
from megatron_rl.standalone.first_rows import Lesson, faults, open_lesson, unknown_end_of
from megatron_rl.standalone.row_counts import counts
from megatron_rl.standalone.shown_rows import shown


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
    held out or lack a column that later ones have, it has all rows."""
    with suppress(ValueError), first_rows(CHECKED + 2 * wanted):
        lesson = open_lesson(config, copies)
        if all(each.problems for each in lesson.sets):
            return lesson
    return open_lesson(config, copies)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings that a run would log."""
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
        from megatron_rl.algorithms.own_baseline import own_baseline
        from megatron_rl.algorithms.own_policy_loss import own_policy_loss
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


if __name__ == "__main__":
    sys.exit(main())
