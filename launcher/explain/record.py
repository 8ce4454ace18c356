"""Everything that the rules read of a run, and its reader."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from launcher.errors import Failed
from launcher.explain.group_facts import NO_FACTS, NO_FORMATS, Formats, GroupFacts, facts_of, formats_of
from launcher.runs.slow_ranks import SlowRank, read_slow_ranks
from launcher.runs.state import resolved_values
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.learning import WINDOW, Hindrance, number, numbers
from megatron_rl.contract.metrics_index import look_up, not_indexed
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import PATIENCE_S, Unreadable, if_readable, patiently, read, read_lines
from megatron_rl.contract.rollout_records import read_rollouts
from megatron_rl.contract.run_records import LessonRecord, PromptCounts

T = TypeVar("T")

RECORDED_STEPS = 50

GREEDY = "greedy_accuracy"  # score of an evaluation set


@dataclass(frozen=True, slots=True)
class Record:
    recipe: Mapping[str, Any]
    """Sections of resolved.yaml."""
    lines: Sequence[MetricsLine]
    evaluations: Sequence[MetricsLine] = ()
    warnings: Sequence[Hindrance] = ()
    slow_ranks: Sequence[SlowRank] = ()
    """Slow ranks of the newest attempt, the slowest first."""
    left_out: Sequence[str] = ()
    formats: Formats = NO_FORMATS
    facts: GroupFacts = NO_FACTS
    lesson: LessonRecord | None = None
    """Counts and right answers from the start; None in runs of an older mrl."""

    @property
    def prompts(self) -> PromptCounts:
        """Counts over the first prompts; zeros if they are not known."""
        return self.lesson.prompts if self.lesson else PromptCounts(0, 0, 0, 0, 0, 0, 0)

    def key(self, name: str, kind: type[T]) -> T | None:
        """Return the value of a recipe key, such as `grpo.policy_loss`; None if it, or its section, is null, or where a
        resolved.yaml that somebody edited has a value of another type."""
        value: Any = self.recipe
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value if isinstance(value, kind) else None

    def last(self, name: str) -> float | None:
        """Return the mean of a metric over the newest steps; None unless each of at least WINDOW steps has it."""
        return _mean(self.lines[-WINDOW:], name)

    def change(self, name: str) -> tuple[float, float] | None:
        """Return the means over the first WINDOW and the newest steps; None unless all of them have the metric."""
        first, last = _mean(self.lines[:WINDOW], name), self.last(name)
        return None if first is None or last is None else (first, last)

    def series(self, name: str) -> list[float]:
        return numbers(self.lines, name)


def _mean(lines: Sequence[MetricsLine], name: str) -> float | None:
    values = numbers(lines, name)
    return sum(values) / WINDOW if len(values) == WINDOW else None


def read_record(run: RunDir, *, answers: bool = True) -> Record:
    """Return the record of a run; damaged lines are left out. Raises Failed if a file cannot be read, and BadInput as
    `resolved_values`. The recorded `answers` of the newest steps take longer to read than all the rest."""
    recipe = resolved_values(run)
    left_out: list[str] = []
    lines = _lines(run.metrics, left_out)
    indexed = patiently(run.metrics, lambda: look_up(run), not_indexed(), PATIENCE_S)
    if isinstance(indexed, Unreadable):
        raise Failed(str(indexed))
    summary = indexed.summary
    for line in lines[bisect_right(lines, summary.step, key=lambda line: line.step) :]:
        summary.add(line)
    evaluations = _lines(run.evaluations, left_out)
    lesson = read(LessonRecord, run.lesson)
    if isinstance(lesson, Unreadable):
        left_out.append(str(lesson))
    found = Record(
        recipe, lines, evaluations, summary.watch.warnings, read_slow_ranks(run), left_out, lesson=if_readable(lesson)
    )
    if not answers:
        return found
    last = lines[-1].step if lines else 0
    groups = [*read_rollouts(run, max(1, last - RECORDED_STEPS + 1), last)]
    return replace(found, formats=formats_of(groups), facts=facts_of(groups))


def _lines(path: Path, left_out: list[str]) -> list[MetricsLine]:
    """Return the lines of a file, by step: those that do not follow the previous step are left out, too."""
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
        left_out.append(f"{path}: {late} lines are left out, because they do not follow the previous step")
    return lines


def scores_of(line: MetricsLine) -> dict[str, dict[str, float]]:
    """Return {evaluation set: {score: value}} of one evaluation, such as {"held_out": {"greedy_accuracy": 0.5}}."""
    found: dict[str, dict[str, float]] = {}
    for name in line.values:
        kind, *between, score = name.split("/")
        if kind == "eval" and between and (value := number(line, name)) is not None:
            found.setdefault("/".join(between), {})[score] = value
    return found


def sampled_shares(evaluations: Iterable[MetricsLine]) -> list[str]:
    """Return the scores of sampled answers that have an interval, such as pass@8: by kind, and then by their k."""
    names = {score for line in evaluations for scores in scores_of(line).values() for score in scores}
    shares = [name.partition("@") for name in names if f"{name}_low" in names]
    return ["".join(share) for share in sorted(shares, key=lambda share: (share[0], len(share[2]), share[2]))]


def held_out_losses(evaluations: Sequence[MetricsLine]) -> dict[str, list[tuple[int, float]]]:
    """Step and loss of each evaluation of a set of held-out rows, by its name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in evaluations:
        for name, scores in scores_of(line).items():
            if "loss" in scores:
                found.setdefault(name, []).append((line.step, scores["loss"]))
    return found


def accuracies(evaluations: Sequence[MetricsLine], score: str = GREEDY) -> dict[str, tuple[float | None, float | None]]:
    """Return a score in the first and the last evaluation of each set that has it; None where all answers were lost."""
    found: dict[str, tuple[float | None, float | None]] = {}
    for line in evaluations:
        for name, scores in scores_of(line).items():
            if score in scores or (score == GREEDY and scores.keys() == {"failed_rollouts"}):
                value = scores.get(score)
                found[name] = (found[name][0] if name in found else value, value)
    return found
