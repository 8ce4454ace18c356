"""Pure: the charts of a run, from the lines of its record."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from launcher.report.curve import Curve, Value, downsample, smoothed
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.learning import number

MOST_RAW = 3
"""Curves of a chart that are shown both as they are and smoothed; of more curves only the smoothed ones are shown."""
MOST_CURVES = 8
"""Curves of one chart, which is the number of colours that stay distinguishable."""
SHARE = "share"
"""Unit of numbers between 0 and 1, shown as percentages."""


class Spec(NamedTuple):
    """A chart of a page."""

    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    """(name or pattern of metrics, label); a label of a pattern is what its * stands for."""
    meaning: str
    band: tuple[str, str, str] | None = None
    """Metrics of the lower and the upper edge of a band behind the first curve, and its meaning."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with its numbers."""

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
    """Whether to mark each point, for curves with few."""


@dataclass(frozen=True, slots=True)
class Group:
    """Charts under one heading."""

    title: str
    charts: list[Chart] = field(default_factory=list)


REWARD = "Reward"
LENGTH = "Length of answers"

GROUPS: dict[str, tuple[Spec, ...]] = {
    "Learning": (
        Spec(REWARD, "", (("mean_reward", "mean of the step"),), "Mean reward of the answers of each step."),
        Spec("Right answers", SHARE, (("right_ratio", "reward 1"),), "Answers whose reward is 1."),
        Spec("Components of the reward", "", (("reward/*", ""),), "Mean of each component, as scored."),
        Spec("Reward by environment", "", (("environments/*/mean_reward", ""),), "Mean reward of each environment."),
        Spec(
            "Groups with signal",
            SHARE,
            (("nonzero_groups_ratio", "rewards differ"),),
            "Groups whose answers earned different rewards. The others have no gradient.",
        ),
        Spec(
            "Signal by environment",
            SHARE,
            (("environments/*/nonzero_groups_ratio", ""),),
            "Groups of each environment whose answers earned different rewards.",
        ),
        Spec("Loss", "", (("loss", "loss"),), "Mean over the updates of a step. In GRPO it stays near zero."),
        Spec(
            "Distance to the teacher",
            "nats",
            (("teacher_kl", "KL(policy || teacher)"),),
            "Estimate for each trained token.",
        ),
    ),
    "Answers": (
        Spec(
            LENGTH,
            "tokens",
            (("answer_length", "mean"),),
            "Tokens that the model sampled.",
            ("answer_length_min", "answer_length_max", "The band is from the shortest to the longest answer."),
        ),
        Spec(
            "Cut off",
            SHARE,
            (("truncated_ratio", "cut off"),),
            "Answers that reached sampling.max_new_tokens.",
        ),
        Spec("Entropy", "nats", (("entropy", "mean"),), "Entropy of the distributions that tokens were drawn from."),
        Spec("Lost answers", "answers", (("failed_rollouts", "lost"),), "Answers without a reward."),
        Spec(
            "Turns and tools",
            "per answer",
            (("turns_mean", "turns"), ("tool_calls_mean", "tool calls"), ("branches_mean", "sequences")),
            "Means over the answers of a step.",
        ),
    ),
    "Updates": (
        Spec("Gradient norm", "", (("grad_norm", "before clipping"),), "Mean over the updates of a step."),
        Spec(
            "Clipped tokens",
            SHARE,
            (("clip_fraction_low", "lower bound"), ("clip_fraction_high", "upper bound")),
            "Trained tokens whose gradient a bound of the loss removed.",
        ),
        Spec("Skipped updates", "updates", (("skipped_updates", "skipped"),), "Updates without a finite gradient."),
        Spec("KL to the initial weights", "nats", (("kl", "estimate"),), "Mean over the trained tokens."),
        Spec(
            "Importance weights",
            "",
            (("importance_ratio", "ratio"), ("importance_weight", "weight")),
            "Probability of a trained token now over that when it was sampled.",
        ),
        Spec("Learning rate", "", (("learning_rate", "last update"),), "Of the last update of a step."),
        Spec(
            "Trainer against engine",
            "nats",
            (("inference_logprob_difference", "mean"), ("inference_logprob_difference_max", "largest")),
            "Difference of the two log-probs of a token, with the same weights unless answers are stale.",
        ),
        Spec(
            "Age of the weights",
            "optimizer steps",
            (("staleness_mean", "mean"), ("staleness_max", "largest")),
            "Optimizer steps between the weights that sampled an answer and those that trained on it.",
        ),
    ),
    "Speed": (
        Spec(
            "Time of a step",
            "s",
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
            "Mean over the ranks, without evaluation and saving.",
        ),
        Spec("Tokens", "per second", (("throughput/tokens_per_s", "whole step"),), "Generated tokens."),
        Spec("Model FLOPs utilisation", SHARE, (("throughput/mfu", "training"),), "Of the training passes."),
        Spec("Memory of a GPU", "GiB", (("system/peak_memory_gib", "peak"),), "Maximum over the GPUs."),
        Spec("Power of a GPU", "W", (("system/power_w", "mean"),), "Mean over the GPUs at the end of training."),
    ),
}
LOGARITHMIC = ("Trainer against engine",)
IN_NO_CHART = ("step", "first_ordinal", "next_ordinal", "policy_version", "answers", "clip_fraction", "reward_std")


def chart_groups(lines: Sequence[MetricsLine], bands: Mapping[str, Band] = {}) -> list[Group]:
    """Return the charts whose metrics the record has, and one for each other number in it.

    Args:
        bands: title of a chart -> its band, from the rollouts.
    """
    names = numeric_names(lines)
    groups = []
    shown = set(IN_NO_CHART)
    for title, specs in GROUPS.items():
        charts = []
        for spec in specs:
            curves = _curves(spec, names)
            shown |= {name for name, _ in curves} | set((spec.band or ())[:2])
            if curves and (chart := make_chart(spec, curves, lines, bands.get(spec.title))):
                charts.append(chart)
        if charts:
            groups.append(Group(title, charts))
    others = [Spec(name, _unit(name), ((name, name.rpartition("/")[2]),), "") for name in names if name not in shown]
    made = [make_chart(spec, list(spec.metrics), lines, None) for spec in others]
    if found := [chart for chart in made if chart]:
        groups.append(Group("Other numbers", found))
    return groups


class Band(NamedTuple):
    """Edges of a band for some of the steps."""

    low: Mapping[int, float]
    high: Mapping[int, float]
    meaning: str


def numeric_names(lines: Iterable[MetricsLine]) -> list[str]:
    """Names of all metrics that are a number in some step, in order."""
    found: dict[str, None] = {}
    for line in lines:
        if not found.keys() >= line.values.keys():
            found |= {name: None for name in line.values if number(line, name) is not None}
    return sorted(found)


def evaluation_metrics(lines: Sequence[MetricsLine]) -> list[str]:
    """Names eval/SET/SCORE of the numbers in evaluations."""
    return [name for name in numeric_names(lines) if re.fullmatch(r"eval/.+/[^/]+", name)]


def score_unit(name: str) -> str:
    """Unit of a score of an evaluation."""
    return SHARE if re.match(r"greedy_accuracy|(pass|avg|maj)@|.*_ratio$|cut_off", name.rpartition("/")[2]) else ""


def evaluation_charts(lines: Sequence[MetricsLine]) -> list[Chart]:
    """Return a chart for each score, with a curve for each set of problems: eval/SET/SCORE over the steps."""
    scores: dict[str, list[str]] = {}
    for name in evaluation_metrics(lines):
        scores.setdefault(name.rpartition("/")[2], []).append(name)
    charts = []
    for score, names in sorted(scores.items(), key=lambda one: (not one[0].startswith("greedy"), one[0])):
        metrics = [(name, name[len("eval/") : -len(score) - 1].replace("_", " ")) for name in names]
        title = score if "@" in score else score.replace("_", " ").capitalize()
        if chart := make_chart(Spec(title, score_unit(score), (), ""), metrics, lines, None, markers=True):
            charts.append(chart)
    return charts


def _curves(spec: Spec, names: Sequence[str]) -> list[tuple[str, str]]:
    """Metrics of a chart with their labels."""
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
    band: Band | None,
    markers: bool = False,
) -> Chart | None:
    """Return the chart of some metrics; None if all of them are 0 in all steps."""
    shown = curves[:MOST_CURVES]
    rows = [(line, [number(line, name) for name, _ in shown]) for line in lines]
    rows = [(line, values) for line, values in rows if any(value is not None for value in values)]
    columns = [[values[place] for _, values in rows] for place in range(len(shown))]
    if not any(value for column in columns for value in column):
        return None
    steps = [line.step for line, _ in rows]
    smooth = [] if markers else [smoothed(column) for column in columns]
    if len(shown) > MOST_RAW and smooth:
        columns, smooth = smooth, []
    edges: list[list[Value]] = []
    if band:
        edges = [[band.low.get(step) for step in steps], [band.high.get(step) for step in steps]]
    elif spec.band:
        edges = [[number(line, name) for line, _ in rows] for name in spec.band[:2]]
    meaning = band.meaning if band else spec.band[2] if spec.band else ""
    points = downsample(steps, [*columns, *smooth, *edges])
    kept = points.columns
    return Chart(
        spec.title,
        spec.unit,
        f"{spec.meaning} {meaning}".strip(),
        points.steps,
        [Curve(label, values) for (_, label), values in zip(shown, kept, strict=False)],
        kept[len(columns) : len(columns) + len(smooth)],
        (kept[-2], kept[-1]) if edges else None,
        len(curves) - len(shown),
        spec.title in LOGARITHMIC,
        markers,
    )


def _unit(name: str) -> str:
    if name.endswith("_s") and name.startswith("time/"):
        return "s"
    return SHARE if name.endswith("_ratio") else ""
