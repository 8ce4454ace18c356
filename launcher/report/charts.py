"""Pure: the charts of a run, from the lines of its record."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from launcher.report.curve import Curve, Value, downsample, smoothed
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.learning import column, number
from megatron_rl.rank.metrics.names import EVALUATION_METRICS, STEP_METRICS

MOST_RAW = 3
"""Curves of a chart that are shown both as they are and smoothed; of more curves only the smoothed ones are shown."""
MOST_CURVES = 8
"""Curves of one chart, which is the number of colours that stay distinguishable."""
SHARE = "share"
PLAIN = ("reward", "ratio")
"""Units that the title of a chart says."""


class Spec(NamedTuple):
    title: str
    metrics: tuple[tuple[str, str], ...]
    """(name or pattern of metrics, label); a label of a pattern is what its * stands for."""
    meaning: str = ""
    """Empty: that of its first metric."""
    band: tuple[str, str, str] | None = None
    """Metrics of the lower and the upper edge of a band behind the first curve, and its meaning."""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    unit: str
    meaning: str
    steps: list[int]
    curves: list[Curve]
    smooth: list[list[Value]] = field(default_factory=list)
    """Each curve smoothed; empty for charts with markers, and if `curves` are smoothed themselves."""
    band: tuple[list[Value], list[Value]] | None = None
    left_out: int = 0
    """Curves beyond MOST_CURVES."""
    log: bool = False
    markers: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    title: str
    charts: list[Chart] = field(default_factory=list)


GROUPS: dict[str, tuple[Spec, ...]] = {
    "Learning": (
        Spec("Reward", (("mean_reward", "mean of the step"),)),
        Spec("Right answers", (("right_ratio", "accuracy 1"),)),
        Spec("Components of the reward", (("reward/*", ""),), "Mean of each component, as scored."),
        Spec("Reward by environment", (("environments/*/mean_reward", ""),), "Mean reward of each environment."),
        Spec("Groups with signal", (("nonzero_groups_ratio", "rewards differ"),)),
        Spec(
            "Signal by environment",
            (("environments/*/nonzero_groups_ratio", ""),),
            "Share of the groups of each environment whose rewards differ.",
        ),
        Spec("Loss", (("loss", "loss"),)),
        Spec("Passes over each set", (("sets/*/epoch", ""),), "Passes over the rows of each set."),
        Spec("Distance to the teacher", (("teacher_kl", "KL(policy || teacher)"),)),
    ),
    "Answers": (
        Spec(
            "Length of answers",
            (("answer_length", "mean"),),
            band=("answer_length_min", "answer_length_max", "The band is from the shortest to the longest answer."),
        ),
        Spec("Cut off", (("truncated_ratio", "cut off"),)),
        Spec("Entropy", (("entropy", "mean"),)),
        Spec("Lost answers", (("failed_rollouts", "lost"),)),
        Spec(
            "Turns and tools",
            (("turns_mean", "turns"), ("tool_calls_mean", "tool calls"), ("branches_mean", "sequences")),
            "Means per answer.",
        ),
    ),
    "Updates": (
        Spec("Gradient norm", (("grad_norm", "before clipping"),)),
        Spec(
            "Clipped tokens",
            (("clip_fraction_low", "lower bound"), ("clip_fraction_high", "upper bound")),
            "Share of the trained tokens whose gradient a bound of the loss removed.",
        ),
        Spec("Skipped updates", (("skipped_updates", "skipped"),)),
        Spec("KL to the initial weights", (("kl", "estimate"),)),
        Spec(
            "Importance weights",
            (("importance_ratio", "ratio"), ("importance_weight", "weight")),
            "Probability of a trained token now over that when it was sampled.",
        ),
        Spec("Learning rate", (("learning_rate", "last update"),)),
        Spec(
            "Trainer against engine",
            (("inference_logprob_difference", "mean"), ("inference_logprob_difference_max", "largest")),
            "Difference of the two log-probs of a token, with the same weights unless answers are stale.",
        ),
        Spec(
            "Age of the weights",
            (("staleness_mean", "mean"), ("staleness_max", "largest")),
            "Optimizer steps between the weights that sampled an answer and those that trained on it.",
        ),
    ),
    "Speed": (
        Spec(
            "Time of a step",
            (
                ("time/step_s", "whole step"),
                ("time/generate_s", "generate"),
                ("time/reward_s", "reward"),
                ("time/log_probs_s", "log-probs"),
                ("time/train_s", "train"),
                ("time/refit_s", "refit"),
                ("time/wait_s", "wait"),
                ("time/offload_s", "off-load"),
            ),
        ),
        Spec("Tokens", (("throughput/tokens_per_s", "whole step"),)),
        Spec("Model FLOPs utilisation", (("throughput/mfu", "training"),)),
        Spec("Memory of a GPU", (("system/peak_memory_gib", "peak"),)),
        Spec("Power of a GPU", (("system/power_w", "mean"),)),
    ),
}
LOGARITHMIC = ("Trainer against engine",)
IN_NO_CHART = ("step", "first_ordinal", "next_ordinal", "policy_version", "answers", "clip_fraction", "reward_std")


def chart_groups(lines: Sequence[MetricsLine]) -> list[Group]:
    """Return the charts whose metrics the record has, and one for each other number."""
    names = numeric_names(lines)
    groups = []
    shown = set(IN_NO_CHART)
    for title, specs in GROUPS.items():
        charts = []
        for spec in specs:
            curves = _curves(spec, names)
            shown |= {name for name, _ in curves} | set((spec.band or ())[:2])
            if curves and (chart := make_chart(spec, curves, lines)):
                charts.append(chart)
        if charts:
            groups.append(Group(title, charts))
    others = [Spec(name, ((name, name.rpartition("/")[2]),)) for name in names if name not in shown]
    made = [make_chart(spec, list(spec.metrics), lines) for spec in others]
    if found := [chart for chart in made if chart]:
        groups.append(Group("Other numbers", found))
    return groups


def numeric_names(lines: Iterable[MetricsLine]) -> list[str]:
    """Names of all metrics that are a number in some step, sorted."""
    found: dict[str, None] = {}
    for line in lines:
        if not found.keys() >= line.values.keys():
            found |= {name: None for name in line.values if number(line, name) is not None}
    return sorted(found)


def evaluation_metrics(lines: Sequence[MetricsLine]) -> list[str]:
    """Return the names of scores of evaluations, without the bounds of their intervals."""
    names = numeric_names(lines)
    bounds = {f"{name}_{end}" for name in names for end in ("low", "high")}
    return [name for name in names if re.fullmatch(r"eval/.+/[^/]+", name) and name not in bounds]


def unit_of(name: str) -> str:
    """Unit of a metric in the page; empty for plain numbers."""
    if name.startswith("eval/"):
        score = name.rpartition("/")[2]
        if score == "loss":
            return EVALUATION_METRICS["eval/held_out_rows/loss"].unit
        return SHARE if re.match(r"greedy_accuracy|(pass|avg|maj)@|.*_ratio$|cut_off", score) else ""
    metric = STEP_METRICS.get(name) or STEP_METRICS.get(name.rpartition("/")[2])  # environments/ID/NAME
    return "" if metric is None or metric.unit in PLAIN else metric.unit


def meaning_of(name: str) -> str:
    """Meaning of a metric as a sentence, without its details; empty for metrics that are not registered."""
    metric = STEP_METRICS.get(name)
    meaning = re.split(r"; | \(|: ", metric.meaning)[0] if metric else ""
    return f"{meaning[0].upper()}{meaning[1:]}." if meaning else ""


def evaluation_charts(lines: Sequence[MetricsLine]) -> list[Chart]:
    """Return a chart for each score, with a curve for each set of problems: eval/SET/SCORE over the steps."""
    scores: dict[str, list[str]] = {}
    for name in evaluation_metrics(lines):
        scores.setdefault(name.rpartition("/")[2], []).append(name)
    charts = []
    for score, names in sorted(scores.items(), key=lambda one: (not one[0].startswith("greedy"), one[0])):
        metrics = [(name, name[len("eval/") : -len(score) - 1].replace("_", " ")) for name in names]
        title = score if "@" in score else score.replace("_", " ").capitalize()
        bounds = f"{names[0]}_low", f"{names[0]}_high"
        if len(names) == 1 and any(bounds[0] in line.values for line in lines):
            spec = Spec(title, (), band=(*bounds, "Band: the 95 % interval over problems."))
        else:
            spec = Spec(title, ())
        if chart := make_chart(spec, metrics, lines, markers=True):
            charts.append(chart)
    return charts


def _curves(spec: Spec, names: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    for pattern, label in spec.metrics:
        before, star, after = pattern.partition("*")
        if not star:
            found += [(pattern, label)] if pattern in names else []
            continue
        matching = [name for name in names if fnmatchcase(name, pattern)]
        found += [(name, name[len(before) : len(name) - len(after)]) for name in matching]
    return found


def make_chart(
    spec: Spec,
    curves: Sequence[tuple[str, str]],
    lines: Sequence[MetricsLine],
    markers: bool = False,
    metric: str | None = None,
) -> Chart | None:
    """Return the chart of some metrics, each by its name in the lines and its label; None if all are 0 in all steps.

    metric: metric that all curves show, if they are of several runs. Default: their names are those of metrics.
    """
    shown = curves[:MOST_CURVES]
    columns = [column(lines, name) for name, _ in shown]
    if not any(map(any, columns)):
        return None
    if None in columns[0]:
        there = [at for at, values in enumerate(zip(*columns, strict=True)) if any(one is not None for one in values)]
        lines = [lines[at] for at in there]
        columns = [[values[at] for at in there] for values in columns]
    steps = [line.step for line in lines]
    smooth = [] if markers else [smoothed(column) for column in columns]
    if len(shown) > MOST_RAW and smooth:
        columns, smooth = smooth, []
    edges: list[list[Value]] = []
    if spec.band:
        edges = [column(lines, name) for name in spec.band[:2]]
    of_band = spec.band[2] if spec.band else ""
    units = {unit_of(metric or name) for name, _ in curves}
    meaning = spec.meaning or meaning_of(metric or curves[0][0])
    points = downsample(steps, [*columns, *smooth, *edges])
    kept = points.columns
    return Chart(
        spec.title,
        units.pop() if len(units) == 1 else "",
        f"{meaning} {of_band}".strip(),
        points.steps,
        [Curve(label, values) for (_, label), values in zip(shown, kept, strict=False)],
        kept[len(columns) : len(columns) + len(smooth)],
        (kept[-2], kept[-1]) if edges else None,
        len(curves) - len(shown),
        spec.title in LOGARITHMIC,
        markers,
    )
