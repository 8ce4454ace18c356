"""Reads a run's directory for the rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launcher.errors import Failed
from launcher.explain.formats import formats_of
from launcher.explain.group_facts import facts_of
from launcher.explain.record import Record
from launcher.runs.slow_ranks import read_slow_ranks
from launcher.runs.state import resolved_values
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.learning import Watch
from megatron_rl.contract.lesson_records import LessonRecord
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import PATIENCE_S, Unreadable, if_readable, read, read_lines
from megatron_rl.contract.rollout_records import read_rollouts

RECORDED_STEPS = 50
"""Newest steps whose recorded answers are read. By default every tenth has some."""


def read_record(run: RunDir, *, answers: bool = True) -> Record:
    """Return the record of a run; damaged lines are left out. Raises Failed if a file cannot be read, and BadInput as
    `resolved_values`.

    answers: whether to read the recorded answers of the newest steps, which takes longer than all the rest.
    """
    recipe = resolved_values(run)
    left_out: list[str] = []
    lines, watch = _lines(run.metrics, left_out), Watch()
    for line in lines:
        watch.add(line)
    evaluations = _lines(run.evaluations, left_out)
    lesson = read(LessonRecord, run.lesson)
    if isinstance(lesson, Unreadable):
        left_out.append(str(lesson))
    found = Record(
        recipe, lines, evaluations, watch.warnings, read_slow_ranks(run), left_out, lesson=if_readable(lesson)
    )
    if not answers:
        return found
    last = lines[-1].step if lines else 0
    groups = [*read_rollouts(run, max(1, last - RECORDED_STEPS + 1), last)]
    return replace(found, formats=formats_of(groups), facts=facts_of(groups))


def _lines(path: Path, left_out: list[str]) -> list[MetricsLine]:
    """Return the lines of a file, by step: those that do not follow the step before them are left out, too."""
    found = read_lines(MetricsLine, path, PATIENCE_S)
    if isinstance(found, Unreadable):
        raise Failed(str(found))
    count = len(found.records) + len(found.damaged)
    damaged = [one for one in found.damaged if one.line < count]  # a run may be writing the last line
    if damaged:
        left_out.append(f"{path}: {len(damaged)} lines are left out: line {damaged[0].line} {damaged[0].why}")
    lines: list[MetricsLine] = []
    for line in found.records:
        if not lines or line.step > lines[-1].step:
            lines.append(line)
    if late := len(found.records) - len(lines):
        left_out.append(f"{path}: {late} lines are left out, because they do not follow the step before them")
    return lines
