"""Charts of a record, whose curves keep their peaks with few points."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.report.charts import GROUPS, MOST_CURVES, Chart, chart_groups, evaluation_charts
from launcher.report.curve import downsample, rounded, smoothed
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.rank.metrics.names import STEP_METRICS


def record(steps: int = 30, **values: Any) -> list[MetricsLine]:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return [MetricsLine(step, dict(named)) for step in range(1, steps + 1)]


def charts(lines: list[MetricsLine]) -> dict[str, Chart]:
    return {chart.title: chart for group in chart_groups(lines) for chart in group.charts}


def test_a_chart_is_shown_for_each_metric_that_the_record_has():
    found = charts(record(mean_reward=0.5, entropy=1.0))
    assert set(found) == {"Reward", "Entropy"}
    assert found["Entropy"].unit == "nats per token"
    assert found["Reward"].curves[0].values == [0.5] * 30
    assert found["Reward"].smooth == [[0.5] * 30]


def test_charts_take_unit_and_meaning_from_the_registry_of_metrics():
    of_groups = [name for specs in GROUPS.values() for spec in specs for name, _ in spec.metrics if "*" not in name]
    assert set(of_groups) <= STEP_METRICS.keys()
    found = charts(
        record(
            loss=1.0,
            entropy=1.0,
            environments__a__nonzero_groups_ratio=0.5,
            throughput__generated_tokens_per_s=1.0,
            new=1,
        )
    )
    assert found["Loss"].meaning == "Loss, mean over the step's updates."
    assert found["Signal by environment"].unit == "share"
    assert (found["new"].unit, found["new"].meaning) == ("", "")
    assert found["throughput/generated_tokens_per_s"].unit == "tokens/s"


def test_a_metric_that_is_always_zero_has_no_chart():
    assert "Lost answers" not in charts(record(mean_reward=0.5, failed_rollouts=0))
    assert "Lost answers" in charts(record(mean_reward=0.5, failed_rollouts=2))


def test_environments_and_components_are_curves_of_one_chart_and_those_beyond_its_colours_are_counted():
    parts = {f"reward__part{number}": 1.0 for number in range(MOST_CURVES + 3)}
    found = charts(record(environments__gsm8k__mean_reward=0.2, environments__code__mean_reward=0.4, **parts))
    assert [curve.label for curve in found["Reward by environment"].curves] == ["code", "gsm8k"]
    chart = found["Components of the reward"]
    assert (chart.curves[0].label, len(chart.curves), chart.left_out) == ("part0", MOST_CURVES, 3)


def test_a_new_number_of_the_record_has_a_chart_of_its_own():
    groups = {group.title: group for group in chart_groups(record(mean_reward=0.5, system__new_thing=3.0))}
    assert [chart.title for chart in groups["Other numbers"].charts] == ["system/new_thing"]


def test_lengths_have_a_band_from_the_shortest_to_the_longest_answer():
    chart = charts(record(answer_length=10.0, answer_length_min=2.0, answer_length_max=30.0))["Length of answers"]
    assert chart.band == ([2.0] * 30, [30.0] * 30)


def test_numbers_that_are_absent_in_some_steps_leave_a_gap():
    lines = [MetricsLine(1, {"loss": 1.0, "kl": 0.1}), MetricsLine(2, {"loss": 1.0}), MetricsLine(3, {"kl": 0.3})]
    found = charts(lines)
    assert found["KL to the initial weights"].steps == [1, 3]
    assert found["Loss"].steps == [1, 2]


def test_evaluations_have_a_chart_for_each_score_and_a_curve_for_each_set():
    lines = [
        MetricsLine(0, {"eval/held_out/greedy_accuracy": 0.2, "eval/trained/greedy_accuracy": 0.3}),
        MetricsLine(9, {"eval/held_out/greedy_accuracy": 0.6, "eval/aime-2024/all/pass@8": 0.1}),
    ]
    greedy, best = evaluation_charts(lines)
    assert (greedy.title, greedy.unit, greedy.markers) == ("Greedy accuracy", "share", True)
    assert [(curve.label, curve.values) for curve in greedy.curves] == [
        ("held out", [0.2, 0.6]),
        ("trained", [0.3, None]),
    ]
    assert [curve.label for curve in best.curves] == ["aime-2024/all"]


VALUES = st.one_of(st.none(), st.floats(-1e6, 1e6).map(rounded))


@given(st.lists(VALUES, min_size=1, max_size=300), st.integers(1, 20))
def test_a_short_curve_has_few_points_and_the_same_ends_and_extremes(values, buckets):
    steps = list(range(10, 10 + len(values)))
    points = downsample(steps, [values], buckets)
    assert len(points.steps) <= max(2 * buckets + 2, 2)
    assert points.steps == sorted(set(points.steps))
    assert {steps[0], steps[-1]} <= set(points.steps)
    assert all(values[step - 10] == kept for step, kept in zip(points.steps, points.columns[0], strict=True))
    known = [value for value in values if value is not None]
    if known:
        kept = [value for value in points.columns[0] if value is not None]
        assert (min(kept), max(kept)) == (min(known), max(known))


def test_each_column_keeps_its_own_peak_at_its_own_step():
    steps = list(range(1000))
    low, high = [float(step == 123) for step in steps], [float(step == 777) for step in steps]
    points = downsample(steps, [low, high], 10)
    assert points.columns[0][points.steps.index(123)] == 1.0
    assert points.columns[1][points.steps.index(777)] == 1.0


@given(st.lists(VALUES, max_size=200))
def test_a_smoothed_value_is_the_mean_of_its_window(values):
    half = max(len(values) // 50, min(7, len(values) // 4) // 2)
    there = [at for at, value in enumerate(values) if value is not None]
    for at, found in enumerate(smoothed(values)):
        window = [value for value in values[max(0, at - half) : at + half + 1] if value is not None]
        inside = window and there[0] <= at <= there[-1]
        assert found == (pytest.approx(sum(window) / len(window), abs=1e-6) if inside else None)


def test_a_smoothed_curve_is_the_mean_of_the_neighbours_that_have_a_value():
    values = [float(step) for step in range(100)]
    assert smoothed(values)[50] == 50.0
    assert smoothed(values)[0] == 1.5  # of 0 to 3: seven steps are averaged at least
    assert smoothed([3.0, None, None])[1] is None
    ended = smoothed([None, *values[:40], None, None])
    assert [at for at, value in enumerate(ended) if value is None] == [0, 41, 42]
    gaps = [1.0 if step % 2 else None for step in range(100)]
    assert set(smoothed(gaps)[1:]) == {1.0}


def test_numbers_that_are_not_finite_are_left_out():
    assert rounded(math.inf) is None
    assert rounded(math.nan) is None
    assert rounded(0.123456789) == 0.12346
