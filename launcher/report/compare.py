"""Pure: several runs beside one another: keys that differ, metrics at the end, the best by one of them, curves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, variance
from typing import Any, NamedTuple

from launcher.explain.record import Record
from launcher.report.charts import GROUPS, Chart, Group, Spec, evaluation_metrics, make_chart
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.learning import WINDOW, number, numbers
from megatron_rl.recipe.section import flat

SHOWN = ("mean_reward", "right_ratio", "loss", "entropy", "answer_length", "truncated_ratio", "time/step_s")
LOWER_IS_BETTER = ("time/", "loss", "teacher_kl", "truncated_ratio", "failed_rollouts", "inference_logprob_difference")
"""Beginnings of metrics whose smallest value is the best."""
LONGEST_LABEL = 32
WITHOUT_EFFECT = ("name", "cluster")


class ComparedRun(NamedTuple):
    name: str
    path: str
    state: str
    record: Record

    @property
    def step(self) -> int:
        return self.record.lines[-1].step if self.record.lines else 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several runs; lists have a value per run."""

    runs: Sequence[ComparedRun]
    keys: Mapping[str, list[Any]]
    metrics: Mapping[str, list[float | None]]
    """Means over the last WINDOW steps; of evaluations the newest value. None where a run has none."""
    by: str
    lowest: bool
    """Whether the lowest value of `by` is the best."""

    @property
    def order(self) -> list[int]:
        """Indexes of the runs, the best first, those without a value last."""
        values = self.metrics[self.by]
        sign = 1.0 if self.lowest else -1.0
        return sorted(range(len(self.runs)), key=lambda at: (values[at] is None, sign * (values[at] or 0.0)))

    @property
    def ranked(self) -> list[int]:
        return [at for at in self.order if self.metrics[self.by][at] is not None]

    @property
    def best(self) -> int | None:
        """Index of the best run; None if several are equally good, or no run has the metric."""
        values, ranked = self.metrics[self.by], self.ranked
        alone = ranked and all(values[at] != values[ranked[0]] for at in ranked[1:])
        return ranked[0] if alone else None


def compare(runs: Sequence[ComparedRun], by: str = "mean_reward", lowest: bool | None = None) -> Comparison:
    """Compare runs by a metric of metrics.jsonl or evaluations.jsonl, whose name says by default if the lowest is the
    best."""
    evaluated = dict.fromkeys(
        name for run in runs for line in run.record.evaluations for name in line.values if name.endswith("_accuracy")
    )
    table = {name: [value_at_end(run.record, name) for run in runs] for name in dict.fromkeys([by, *SHOWN, *evaluated])}
    known = {name: values for name, values in table.items() if name == by or any(value is not None for value in values)}
    keys = differing([run.record.recipe for run in runs])
    return Comparison(runs, keys, known, by, by.startswith(LOWER_IS_BETTER) if lowest is None else lowest)


def differing(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return key -> its value in each recipe, for the keys that are not equal in all; None where a key is absent."""
    flats = [flat(one) for one in recipes]
    keys = dict.fromkeys(key for one in flats for key in one)
    table = {key: [one.get(key) for one in flats] for key in keys if key not in WITHOUT_EFFECT}
    return {key: values for key, values in table.items() if any(value != values[0] for value in values)}


def verdict(found: Comparison) -> str:
    """Return which of the ranked runs is the best, and whether its lead over the next one is more than noise."""
    first, *others = [found.runs[at] for at in found.ranked]
    value = value_at_end(first.record, found.by)
    which = "lowest" if found.lowest else "highest"
    text = f"best by {found.by} ({which}, mean of the last {WINDOW} steps): "
    if others and found.best is None:
        equal = [run.name for run in (first, *others) if value_at_end(run.record, found.by) == value]
        return f"{text}{' and '.join(equal)} are equal, {value:.4g}"
    text += f"{first.name}, {value:.4g}"
    if not others:
        return text
    text += f"; next: {others[0].name}, {value_at_end(others[0].record, found.by):.4g}"
    ends = [numbers(run.record.lines, found.by)[-WINDOW:] for run in (first, others[0])]
    if min(map(len, ends)) < WINDOW:
        return text
    lead = abs(fmean(ends[0]) - fmean(ends[1]))
    error = sqrt(sum(variance(end) for end in ends) / WINDOW)
    return text if lead > 2 * error else f"{text} (no more than noise: 2 standard errors are {2 * error:.2g})"


def labels(names: Sequence[str], longest: int) -> list[str]:
    """Shorten names to what differs: without the parts that all begin and end with, and cut in their middle beyond
    `longest` characters. Equal names stay as they are."""
    if len(set(names)) < len(names) or len(names) < 2:
        return [_cut(name, longest) for name in names]
    parts = [re.findall(r"[^-_.,]+[-_.,]*|^[-_.,]+", name) for name in names]
    start = _alike(parts)
    end = min(_alike([its[::-1] for its in parts]), min(map(len, parts)) - start)
    kept = ["".join(its[start : len(its) - end]).strip("-_.,") for its in parts]
    found = kept if all(kept) and len(set(kept)) == len(kept) else names
    cut = [_cut(name, longest) for name in found]
    return cut if len(set(cut)) == len(cut) else [f"{at}: {name}" for at, name in enumerate(cut, 1)]


def _alike(lists: Sequence[Sequence[str]]) -> int:
    """Return the number of leading entries that all lists share; one of each is left over."""
    most = min(map(len, lists)) - 1
    return next((at for at in range(most) if len({its[at] for its in lists}) > 1), max(0, most))


def _cut(name: str, longest: int) -> str:
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[half - longest + 1 :]}"


def short(keys: Sequence[str]) -> list[str]:
    ends = Counter(key.rpartition(".")[2] for key in keys)
    return [end if ends[end := key.rpartition(".")[2]] == 1 else key for key in keys]


def value_at_end(record: Record, name: str) -> float | None:
    """Return the mean of a metric over the last WINDOW steps that have it, or its newest evaluation, or None."""
    values = numbers(record.lines, name)[-WINDOW:]
    if values:
        return sum(values) / len(values)
    return next(iter(numbers(record.evaluations, name)[-1:]), None)


def overlaid(runs: Sequence[ComparedRun]) -> list[Group]:
    steps, evaluations = [run.record.lines for run in runs], [run.record.evaluations for run in runs]
    names = labels([run.name for run in runs], LONGEST_LABEL)
    scores = sorted({name for lines in evaluations for name in evaluation_metrics(lines)})
    groups = [
        Group(
            "Evaluations",
            [chart for name in scores if (chart := _chart(_of_score(name), name, names, evaluations, markers=True))],
        )
    ]
    for title, specs in GROUPS.items():
        single = [(spec, name, label) for spec in specs for name, label in spec.metrics if "*" not in name]
        charts = [_chart(_of_one(spec, label), name, names, steps) for spec, name, label in single]
        groups.append(Group(title, [chart for chart in charts if chart]))
    return [group for group in groups if group.charts]


def _of_score(name: str) -> Spec:
    title = name.removeprefix("eval/").replace("_", " ").replace("/", ", ")
    return Spec(title[:1].upper() + title[1:], ())


def _of_one(spec: Spec, label: str) -> Spec:
    single = len(spec.metrics) == 1
    return Spec(spec.title if single else f"{spec.title}: {label}", (), spec.meaning if single else "")


def _chart(
    spec: Spec, metric: str, names: Sequence[str], runs: Sequence[Sequence[MetricsLine]], markers: bool = False
) -> Chart | None:
    values: dict[int, dict[str, float]] = {}
    for place, lines in enumerate(runs):
        for line in lines:
            if (value := number(line, metric)) is not None:
                values.setdefault(line.step, {})[str(place)] = value
    together = [MetricsLine(step, dict(values[step])) for step in sorted(values)]
    return make_chart(spec, [(str(place), name) for place, name in enumerate(names)], together, markers, metric)
