"""The interval between two saves: Daly's optimum, from the cost of a save and the failures so far."""

from __future__ import annotations

import math

import pytest

from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart
from megatron_rl.contract.checkpoint_interval import FailureHistory, SaveCost, best_interval_s, failure_history

DAY = 86400.0


def lost_share(interval: float, blocked: float, between: float) -> float:
    """Exact share of time lost if failures are a Poisson process (Daly 2006, equation 20, without restart time): each
    stretch of `interval` seconds is repeated until it passes without a failure."""
    useful = interval - blocked
    return between * math.expm1(interval / between) / useful - 1


@pytest.mark.parametrize(("blocked", "between"), [(1.0, DAY), (10.0, 3600.0), (60.0, 4 * 3600.0), (120.0, 1800.0)])
def test_no_other_interval_loses_noticeably_less(blocked: float, between: float) -> None:
    best = best_interval_s(SaveCost(blocked, 0.0), between)
    least = min(lost_share(best * factor / 100, blocked, between) for factor in range(50, 200))
    assert lost_share(best, blocked, between) <= least * 1.002


def test_a_save_longer_than_the_time_between_failures_is_made_once_in_that_time() -> None:
    assert best_interval_s(SaveCost(300.0, 300.0), 100.0) == 400.0


def test_a_save_does_not_start_before_the_previous_one_is_written() -> None:
    assert best_interval_s(SaveCost(0.01, 900.0), DAY) == 900.0


def test_one_failure_a_day_is_expected_without_data() -> None:
    assert failure_history([], 0.0).mean_time_between_failures_s == DAY


def test_every_end_but_the_finish_is_a_failure_and_only_running_time_counts() -> None:
    ledger = [
        AttemptStart(1, 100.0),
        AttemptEnd(1, 400.0, "drained"),
        AttemptStart(2, 5000.0),  # waited in the queue before
        AttemptEnd(2, 5100.0, "crashed"),
        AttemptStart(3, 6000.0),
        AttemptEnd(3, 6050.0, "finished"),
    ]
    assert failure_history(ledger, 9999.0) == FailureHistory(failures=2, running_s=450.0)


def test_an_attempt_counts_as_long_as_it_measured_itself_although_the_clock_was_set() -> None:
    ledger = [AttemptStart(1, 100.0), AttemptEnd(1, 1e9, "crashed", seconds=60.0)]
    assert failure_history(ledger, 1e9) == FailureHistory(failures=1, running_s=60.0)


def test_a_running_attempt_counts_until_now() -> None:
    assert failure_history(
        [AttemptStart(1, 100.0), AttemptEnd(1, 200.0, "lost"), AttemptStart(2, 300.0)], 350.0
    ) == FailureHistory(1, 150.0)


def test_observations_outweigh_the_prior() -> None:
    """The prior day hardly counts beside thirty failures in thirty hours."""
    assert FailureHistory(30, 30 * 3600.0).mean_time_between_failures_s == pytest.approx(3600.0, rel=0.75)
    assert FailureHistory(300, 300 * 3600.0).mean_time_between_failures_s == pytest.approx(3600.0, rel=0.08)
