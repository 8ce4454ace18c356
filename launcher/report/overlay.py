"""Pure: curves of several runs over one another."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.report.charts import GROUPS, Chart, Group, Spec, evaluation_metrics, make_chart
from launcher.report.compare import ComparedRun, labels
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.learning import number

LONGEST = 32
"""Characters of a run's name in a legend."""


def overlaid(runs: Sequence[ComparedRun]) -> list[Group]:
    """Return a chart for each metric, with a curve for each of the first runs."""
    steps, evaluations = [run.record.lines for run in runs], [run.record.evaluations for run in runs]
    names = labels([run.name for run in runs], LONGEST)
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
    """Chart of one of the metrics of a chart, without a band."""
    single = len(spec.metrics) == 1
    return Spec(spec.title if single else f"{spec.title}: {label}", (), spec.meaning if single else "")


def _chart(
    spec: Spec, metric: str, names: Sequence[str], runs: Sequence[Sequence[MetricsLine]], markers: bool = False
) -> Chart | None:
    """Return the chart of one metric; None if no run has it."""
    values: dict[int, dict[str, float]] = {}
    for place, lines in enumerate(runs):
        for line in lines:
            if (value := number(line, metric)) is not None:
                values.setdefault(line.step, {})[str(place)] = value
    together = [MetricsLine(step, dict(values[step])) for step in sorted(values)]
    return make_chart(spec, [(str(place), name) for place, name in enumerate(names)], together, None, markers, metric)
