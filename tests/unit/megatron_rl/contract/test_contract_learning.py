"""Learning warnings: each rule detects its own problem, and a healthy run has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.learning import TREND_STEPS, WINDOW, Hindrance, number
from megatron_rl.contract.window_rules import RULES, Watch

GOOD: dict[str, Any] = {
    "answers": 64,
    "answer_length": 100.0,
    "failed_rollouts": 0,
    "grad_norm": 0.5,
    "learning_rate": 1e-6,
    "loss": -0.01,
    "mean_reward": 0.3,
    "nonzero_groups_ratio": 0.7,
    "reward_std": 0.45,
    "right_ratio": 0.3,
    "skipped_updates": 0,
    "truncated_ratio": 0.1,
}
ALL_WRONG = {"mean_reward": 0.0, "reward_std": 0.0, "right_ratio": 0.0, "nonzero_groups_ratio": 0.0, "grad_norm": 0.0}
ALL_RIGHT = {**ALL_WRONG, "mean_reward": 1.0, "right_ratio": 1.0}
LOST = {
    "answers": 58,
    "failed_rollouts": 6,
    "failed_rollouts_by_reason": {"timeout": 2, "get_reward: ValueError: x": 4},
}


def step(number: int, **values: Any) -> MetricsLine:
    """Step of a learning run with some other values. None: absent."""
    return MetricsLine(number, {name: value for name, value in {**GOOD, **values}.items() if value is not None})


def record(good: int, odd: int, **values: Any) -> list[MetricsLine]:
    """Steps of a learning run, followed by steps with these values."""
    return [step(number, **(values if number > good else {})) for number in range(1, good + odd + 1)]


def warnings_of(lines: list[MetricsLine]) -> list[Hindrance]:
    """Warnings at the end of a record."""
    watch = Watch()
    for line in lines:
        watch.add(line)
    return watch.warnings


def curve(reward: Callable[[int], float], steps: int) -> list[MetricsLine]:
    """Run whose reward follows a curve with noise."""
    noise = (0.02, -0.01, -0.02, 0.01)
    rewards = [reward(number) + noise[number % 4] for number in range(1, steps + 1)]
    return [step(number, mean_reward=value, right_ratio=value) for number, value in enumerate(rewards, 1)]


@pytest.mark.parametrize(
    ("lines", "name", "since", "seen"),
    [
        (
            record(0, 5, **ALL_WRONG),
            "constant-rewards",
            1,
            "Every answer of the last 5 steps earned the same reward, 0",
        ),
        (record(0, 5, **ALL_RIGHT), "constant-rewards", 1, "the same reward, 1"),
        (record(20, 12, **ALL_WRONG), "constant-rewards", 21, "the last 10 steps"),
        (record(0, 3, nonzero_groups_ratio=0.0), "no-signal", 1, "100% of the groups of the last 3 steps; 30% of them"),
        (record(0, 9, nonzero_groups_ratio=0.05), "no-signal", 1, "95% of the groups"),
        (record(4, 20, truncated_ratio=0.98), "truncated", 5, "98% of the answers of the last 10 steps were cut"),
        (
            record(0, 1, **LOST),
            "lost-answers",
            1,
            "6 of 64 answers of the last step were lost: 4 x get_reward: ValueError: x, 2 x timeout",
        ),
        (
            record(7, 1, failed_rollouts=6),
            "lost-answers",
            8,
            "6 of 518 answers of the last 8 steps were lost: no reason",
        ),
        (
            record(2, 1, first_ordinal=0, next_ordinal=20, dropped_ordinals={"3": "overdue", "4": "no signal"}),
            "dropped-prompts",
            3,
            "1 of 20 prompts of the last 3 steps were dropped: 1 x overdue",
        ),
        (record(5, 1, skipped_updates=1, grad_norm=None), "skipped-updates", 6, "1 updates of the last 6 steps"),
        (record(5, 2, loss=None), "nonfinite-loss", 6, "not finite in 2 of the last 7 steps"),
        (record(2, 1, nonfinite_tokens=64), "nonfinite-tokens", 3, "64 tokens of the last 3 steps were excluded"),
        (record(0, 1, learning_rate=1e30), "learning-rate", 1, "reached 1e+30 in the last step"),
        (record(3, 1, loss=-5e3), "loss", 4, "The loss reached 5e+03"),
        (record(3, 1, grad_norm=2e4), "grad-norm", 4, "The gradient norm reached 2e+04"),
        (record(0, 4, grad_norm=0.0), "zero-gradient", 1, "was zero, although rewards differed in 70% of the groups"),
        (record(0, 4, learning_rate=0.0), "zero-learning-rate", 1, "The learning rate of the last 4 steps was 0"),
        (curve(lambda _: 0.3, TREND_STEPS), "reward-not-rising", 1, "0.3 in the first 75 steps, 0.3 in the last 75"),
        (curve(lambda at: 0.6 - at / 1000, 400), "reward-not-rising", 1, "the last 100"),
        (
            curve(lambda at: 0.1 + at / 100 if at <= 60 else 0.15, 70),
            "reward-collapse",
            60,
            "The mean reward of the last 10 steps is 0.147; until step 60 it had risen to 0.65",
        ),
    ],
)
def test_each_rule_reports_its_observation_and_first_step(
    lines: list[MetricsLine], name: str, since: int, seen: str
) -> None:
    (warning,) = warnings_of(lines)
    assert (warning.name, warning.since) == (name, since)
    assert seen in warning.seen
    assert str(warning) == f"{warning.seen} (since step {since}). {RULES[name].advice}"


def test_every_rule_has_a_case() -> None:
    cases = test_each_rule_reports_its_observation_and_first_step.pytestmark[0].args[1]
    assert {case[1] for case in cases} == RULES.keys()


@pytest.mark.parametrize(
    "lines",
    [
        record(40, 0),
        record(0, 2, **ALL_WRONG, truncated_ratio=1.0),
        record(20, 20, **ALL_RIGHT),
        record(0, 40, right_ratio=0.97, mean_reward=0.97, nonzero_groups_ratio=0.1, reward_std=0.1),
        record(5, 1, failed_rollouts=3),
        record(2, 9, first_ordinal=0, next_ordinal=9, dropped_ordinals=dict.fromkeys("12345", "no signal")),
        record(0, 40, grad_norm=None, loss=None, learning_rate=None),
        curve(lambda at: 0.3 + at / 1000, TREND_STEPS),
        curve(lambda at: 0.3, TREND_STEPS - 1),
        curve(lambda at: 0.95, TREND_STEPS),
        curve(lambda at: min(0.85, 0.2 + at / 200), 1000),
        curve(lambda at: 0.1 + at / 100 if at <= 60 else 0.5, 90),
    ],
    ids=[
        "a run that learns",
        "two odd batches",
        "a task that was learned",
        "a task that is nearly learned",
        "fewer answers lost than one in a hundred",
        "groups that dynamic sampling passes over",
        "a record without updates",
        "a reward that rises",
        "a reward that may still rise",
        "a task that was solved before",
        "a reward that has risen",
        "a reward that lost a part of its rise",
    ],
)
def test_healthy_run_has_no_warning(lines: list[MetricsLine]) -> None:
    watch = Watch()
    assert [warning for line in lines for warning in watch.add(line)] == []


def test_warning_starts_once_keeps_its_step_and_ends() -> None:
    watch = Watch()
    began = [(line.step, *watch.add(line)) for line in record(5, 30, truncated_ratio=0.9)]
    ((step_, warning),) = [each for each in began if len(each) > 1]
    assert (step_, warning.name, warning.since) == (10, "truncated", 6)
    assert [each.since for each in watch.warnings] == [6]
    for later in range(36, 36 + WINDOW):
        assert watch.add(step(later)) == []
    assert watch.warnings == []


ODD = st.one_of(
    st.none(), st.booleans(), st.text(max_size=3), st.floats(-1e9, 1e9), st.dictionaries(st.text(), st.none())
)


@given(
    st.lists(
        st.dictionaries(st.sampled_from([*GOOD, "failed_rollouts_by_reason", "dropped_ordinals"]), ODD), max_size=15
    )
)
def test_no_record_breaks_a_rule(values: list[dict[str, Any]]) -> None:
    warnings_of(MetricsLine(number, each) for number, each in enumerate(values, 1))


def test_a_reason_cannot_control_the_terminal() -> None:
    lost = {**LOST, "failed_rollouts_by_reason": {"\x1b]0;title\x07\nno error": 6}}
    (warning,) = warnings_of(record(0, WINDOW, **lost))
    assert "\\x1b]0;title\\x07\\nno error" in warning.seen and warning.seen.isprintable()


@pytest.mark.parametrize("value", [True, "1", None, [1.0], 10**400])
def test_values_that_are_no_number_are_taken_for_not_measured(value: Any):
    watch = Watch()
    for number_of_step in range(1, 2 * WINDOW):
        watch.add(step(number_of_step, mean_reward=value, loss=value))
    assert number(step(1, loss=value), "loss") is None
