"""Why a job is signalled, as Slurm's record tells it, and what becomes of it when its attempt has ended."""

from __future__ import annotations

import time

import pytest

from launcher.host.policy import cause_of, decide
from launcher.host.slurm import parse_fields
from launcher.host.verdict import Verdict

NOW = time.mktime(time.strptime("2026-11-21T08:00:00", "%Y-%m-%dT%H:%M:%S"))
NOTICE = 120.0

# Fields of `scontrol show job` as Slurm 22.05 wrote them at that moment.
RECORDS = {
    "time limit": {"StartTime": "07:00:30", "EndTime": "08:00:30", "TimeLimit": "01:00:00", "PreemptTime": "None"},
    "preempted": {"StartTime": "07:50:00", "EndTime": "08:00:20", "TimeLimit": "01:00:00", "PreemptTime": "08:00:00"},
    "cancelled": {"StartTime": "07:50:00", "EndTime": "08:00:00", "TimeLimit": "01:00:00", "PreemptTime": "None"},
    "signal": {"StartTime": "07:50:00", "EndTime": "08:50:00", "TimeLimit": "01:00:00", "PreemptTime": "None"},
}


def record(values: dict[str, str]) -> dict[str, str]:
    dated = {
        key: f"2026-11-21T{value}" if key != "TimeLimit" and value[0].isdigit() else value
        for key, value in values.items()
    }
    return {"JobState": "RUNNING", **dated}


@pytest.mark.parametrize("cause", RECORDS)
def test_the_cause_is_read_from_slurms_record(cause):
    assert cause_of(record(RECORDS[cause]), NOW, NOTICE).cause == cause


def test_the_deadline_is_the_end_that_slurm_has_set():
    assert cause_of(record(RECORDS["preempted"]), NOW, NOTICE).deadline == NOW + 20


def test_a_cancelled_job_is_recognised_though_it_says_completing_or_has_no_limit():
    seen = record(RECORDS["cancelled"]) | {"JobState": "COMPLETING", "TimeLimit": "UNLIMITED"}
    assert cause_of(seen, NOW + 3, NOTICE).cause == "cancelled"


def test_a_job_cancelled_while_it_saves_because_of_a_preemption_is_cancelled():
    seen = record(RECORDS["preempted"])
    assert cause_of(seen, NOW + 5, NOTICE, deadline=NOW + 20).cause == "preempted"
    ended = seen | {"JobState": "COMPLETING", "EndTime": "2026-11-21T08:00:04"}
    assert cause_of(ended, NOW + 5, NOTICE, deadline=NOW + 20).cause == "cancelled"


def test_a_job_that_somebody_requeued_is_not_cancelled():
    ended = record(RECORDS["cancelled"]) | {"JobState": "COMPLETING", "Restarts": "1"}
    assert cause_of(ended, NOW + 1, NOTICE, restarts=0).cause == "requeue"
    assert cause_of(ended, NOW + 1, NOTICE, restarts=1).cause == "cancelled"


def test_a_record_without_times_says_nothing():
    assert (
        cause_of({"JobState": "RUNNING", "EndTime": "Unknown", "TimeLimit": "UNLIMITED"}, NOW, NOTICE).cause == "signal"
    )


SAVED = Verdict("drained", 40, None, None)

# verdict, cause, own job, Slurm -> outcome, requeued by us, exit code
TABLE = [
    (Verdict("finished", 300, None, None), None, True, [22, 5], "finished", False, 0),
    (Verdict("finished", 300, None, None), "preempted", True, [22, 5], "finished", False, 0),
    (SAVED, "preempted", True, [22, 5, 8], "drained", True, 75),
    (SAVED, "preempted", True, [24, 5, 0], "drained", False, 75),
    (SAVED, "time limit", True, [24, 5, 0], "drained", True, 75),
    (SAVED, "signal", True, [22, 5], "drained", True, 75),
    (SAVED, "bad nodes", True, [22, 5], "drained", True, 75),
    (SAVED, "requeue", True, [22, 5], "drained", True, 75),
    (SAVED, "cancelled", True, [22, 5], "stopped", False, 0),
    (SAVED, "time limit", False, [22, 5], "drained", False, 75),
    (Verdict("crashed", 7, "ValueError", 3), None, True, [22, 5], "crashed", False, 1),
    (Verdict("crashed", 7, "ValueError", 3), "preempted", True, [22, 5], "crashed", False, 1),
    (Verdict("misconfigured", 0, "no such file", 0), None, True, [22, 5], "misconfigured", False, 78),
]


@pytest.mark.parametrize(("verdict", "cause", "own", "slurm", "outcome", "requeue", "code"), TABLE)
def test_what_becomes_of_the_job(verdict, cause, own, slurm, outcome, requeue, code):
    drain = {"cause": cause} if cause else None
    decision = decide(verdict, drain, own, slurm)
    assert (decision.outcome, decision.requeue, decision.exit_code) == (outcome, requeue, code)


def test_a_drain_without_a_checkpoint_says_so():
    assert (
        "without a new checkpoint"
        in decide(Verdict("drained", None, None, None), {"cause": "preempted"}, True, [22]).message
    )


def test_fields_of_a_job_may_hold_blanks_and_equal_signs():
    line = "JobId=7 JobName=it's a=b name UserId=root(0) StdOut=/tmp/a b/c=d.log Reason=None NodeList=node[01-02]"
    fields = parse_fields(line)
    assert fields["StdOut"].startswith("/tmp/a b/")
    assert fields["NodeList"] == "node[01-02]"
    assert fields["UserId"] == "root(0)"


@pytest.mark.parametrize(("cause", "attempts"), [("bad nodes", 5), ("time limit", 3)])
def test_attempts_in_vain_come_to_an_end(cause, attempts):
    nothing = Verdict("drained", None, None, None)
    assert decide(nothing, {"cause": cause}, True, [22, 5], in_a_row=attempts - 2).requeue
    last = decide(nothing, {"cause": cause}, True, [22, 5], in_a_row=attempts - 1)
    assert (last.outcome, last.requeue) == ("crashed", False)
    assert f"{attempts} attempts in a row" in last.message


def test_preemptions_are_never_in_vain():
    assert decide(Verdict("drained", None, None, None), {"cause": "preempted"}, True, [22, 5], in_a_row=99).requeue


def test_an_attempt_that_saved_is_not_in_vain():
    assert decide(SAVED, {"cause": "time limit"}, True, [22, 5], in_a_row=99).requeue
