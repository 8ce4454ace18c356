"""Timeline and attempts, from the accounting of GPU-seconds."""

from __future__ import annotations

import pytest

from launcher.host.record.accounting import AttemptTrace, goodput_of, gpu_usage
from launcher.report.usage import STACKED, UsageTimeline, attempt_rows, timeline
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, TimelineLine

LEDGER = [
    AttemptStart(1, 100.0, gpus=2, submitted_at=50.0, job_id="1", nodes=["a", "b"]),
    AttemptEnd(1, 200.0, "drained", seconds=100.0, step=3, cause="preempted", then="requeue"),
    AttemptStart(2, 900.0, gpus=2, submitted_at=880.0, job_id="2"),
    AttemptEnd(2, 980.0, "finished", seconds=80.0, step=9),
]
TRACES = {
    1: AttemptTrace(
        [
            TimelineLine(120.0, 0, {"start-up": 40.0}, began=100.0, ranks=2, resumed=0),
            TimelineLine(200.0, 3, {"train": 100.0, "generate": 60.0}),
        ],
        left=True,
    ),
    2: AttemptTrace(
        [
            TimelineLine(910.0, 3, {"load": 20.0}, began=900.0, ranks=2, resumed=3),
            TimelineLine(980.0, 9, {"train": 140.0}),
        ],
        left=True,
    ),
}
USAGE = gpu_usage(LEDGER, TRACES, 1000.0)


def amounts(found: UsageTimeline) -> dict[str, float]:
    """GPU-seconds of each category in the slices of all lanes, for two GPUs."""
    width = 2 * found.seconds / len(found.lanes[0].shares)
    totals = [sum(slice_[at] for lane in found.lanes for slice_ in lane.shares) * width for at in range(len(STACKED))]
    return {name: total for name, total in zip(STACKED, totals, strict=True) if total}


@pytest.mark.parametrize("slices", [1, 7, 240])
def test_the_timeline_holds_every_gpu_second_once_whatever_the_slices(slices):
    found = timeline(USAGE, slices)
    assert found is not None
    assert found.seconds == 250.0  # 50 in the queue, 100, 20 in the queue, 80: the pause between is left out
    assert [(mark.at, mark.attempt) for mark in found.marks] == [(0.0, 1), (150.0, 2)]
    charged = {name: value for name, value in USAGE.total.items() if value}
    assert amounts(found) == pytest.approx(charged, rel=1e-3)
    assert all(sum(slice_) == pytest.approx(1.0, abs=1e-3) for slice_ in found.lanes[0].shares)


def test_replicas_have_a_lane_of_their_own():
    start = AttemptStart(1, 0.0, gpus=4, generating=2)
    trace = AttemptTrace([TimelineLine(10.0, 1, {"generate": 12.0, "train": 8.0}, began=0.0, ranks=2)], left=True)
    found = timeline(gpu_usage([start, AttemptEnd(1, 10.0, "finished", seconds=10.0)], {1: trace}, 10.0), 1)
    assert found is not None
    named = {lane.role: dict(zip(STACKED, lane.shares[0], strict=True)) for lane in found.lanes}
    assert (named["training ranks"]["wait"], named["training ranks"]["train"]) == (0.6, 0.4)
    assert (named["replicas"]["generate"], named["replicas"]["wait"]) == (0.6, 0.4)


def test_a_run_that_has_not_started_has_no_timeline_and_no_goodput():
    empty = gpu_usage([], {}, 0.0)
    assert timeline(empty) is None
    assert goodput_of(empty.total) is None


def test_attempts_say_how_they_ended_and_how_long_they_waited():
    first, second = attempt_rows(USAGE, LEDGER, 1000.0)
    assert (first.attempt, first.queued_s, first.seconds, first.nodes) == (1, 50.0, 100.0, ["a", "b"])
    assert "saved after step 3 (preempted)" in first.ending
    assert first.goodput == pytest.approx(0.8)
    assert second.ending == "finished after step 9"
    (running,) = attempt_rows(gpu_usage(LEDGER[:1], TRACES, 200.0, running=True), LEDGER[:1], 200.0)
    assert running.ending == ""
