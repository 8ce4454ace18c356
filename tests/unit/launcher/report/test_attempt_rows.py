"""Attempts of a run, from the accounting of GPU-seconds."""

from __future__ import annotations

import pytest

from launcher.host.record.accounting import AttemptTrace, gpu_usage
from launcher.report.read import attempt_rows
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


def test_attempts_say_how_they_ended_and_how_long_they_waited():
    first, second = attempt_rows(USAGE, LEDGER, 1000.0)
    assert (first.attempt, first.queued_s, first.seconds, first.nodes) == (1, 50.0, 100.0, ["a", "b"])
    assert "saved after step 3 (preempted)" in first.ending
    assert first.goodput == pytest.approx(0.8)
    assert second.ending == "finished after step 9"
    (running,) = attempt_rows(gpu_usage(LEDGER[:1], TRACES, 200.0, running=True), LEDGER[:1], 200.0)
    assert running.ending == ""
