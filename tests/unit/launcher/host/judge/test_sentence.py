"""The end of an attempt in one line, as mrl status and the batch log show it."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.backends.slurm.jobs import JobState
from launcher.backends.slurm.reasons import wait_of
from launcher.host.judge.sentence import describe_end
from megatron_rl.contract.attempt_records import AttemptEnd

NOW = 1000.0
CRASH = {"outcome": "crashed", "step": 40, "rank": 1, "node": "n3", "phase": "training", "error": "RuntimeError: boom"}
HANG = {**CRASH, "step": 41, "phase": "generating", "error": "silent for 1800 s", "hung": True}
AGAIN = {"then": "requeue", "crashes": 2}
HELD = {"then": "held", "why": "the same error at the same step twice"}


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (
            {"outcome": "drained", "step": 40, "cause": "preempted", "then": "requeue"},
            "saved after step 40 (preempted)",
        ),
        (
            {"outcome": "finished", "step": 40, "then": "over", "why": "the loss has not fallen"},
            "finished after step 40; the loss has not fallen",
        ),
        ({"outcome": "drained", "step": None, "cause": "preempted"}, "left without a new checkpoint (preempted)"),
        (
            {**CRASH, **AGAIN, "not_before": NOW + 250},
            "crashed at step 40 (training): rank 1 on n3: RuntimeError: boom; starts again in 4 min, 2nd of at most 3 "
            "without a new checkpoint",
        ),
        (
            {**CRASH, **AGAIN, "not_before": NOW - 1, "excluded": ["n3"]},
            "crashed at step 40 (training): rank 1 on n3: RuntimeError: boom; starts again, 2nd of at most 3 without a "
            "new checkpoint; without n3, if enough others are left",
        ),
        (
            {**CRASH, **HELD},
            "crashed at step 40 (training): rank 1 on n3: RuntimeError: boom; held: the same error at the same step "
            "twice",
        ),
        (
            {**CRASH, "phase": None, "error": "No space left on device: '/runs/r'", "then": "over", "why": "make room"},
            "the disk is full: it stopped at step 40: rank 1 on n3: No space left on device: '/runs/r'; make room",
        ),
        ({**HANG, "then": "over"}, "hung at step 41 (generating): rank 1 on n3: silent for 1800 s"),
        (
            {"outcome": "lost", "cause": "node failure", "error": "n3 went down", "then": "slurm", "excluded": ["n3"]},
            "n3 went down (node failure); without n3, if enough others are left",
        ),
    ],
)
def test_an_end_in_one_line(end: dict[str, Any], said: str) -> None:
    assert describe_end(AttemptEnd(1, NOW, **end), NOW) == said


def test_a_successor_waits_for_the_job_before_it() -> None:
    job = JobState("8", "PENDING", "pending", reason="Dependency", dependency="singleton(unfulfilled)")
    assert wait_of(job).what == "the job before it to end"
