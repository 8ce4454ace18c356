"""The cause for which a job is signalled, by Slurm's record."""

from __future__ import annotations

import time

import pytest

from launcher.host.judge.causes import Cause, cause_in_log, cause_of, completed, is_complete, is_truer
from launcher.host.slurm.formats import parse_fields
from megatron_rl.contract.attempt_records import Drain

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


def test_the_end_is_the_end_that_slurm_has_set():
    assert cause_of(record(RECORDS["preempted"]), NOW, NOTICE).end == NOW + 20


def test_a_cancelled_job_is_recognised_though_it_says_completing_or_has_no_limit():
    seen = record(RECORDS["cancelled"]) | {"JobState": "COMPLETING", "TimeLimit": "UNLIMITED"}
    assert cause_of(seen, NOW + 3, NOTICE).cause == "cancelled"


def test_a_job_cancelled_while_it_saves_because_of_a_preemption_is_cancelled():
    seen = record(RECORDS["preempted"])
    assert cause_of(seen, NOW + 5, NOTICE, end_before=NOW + 20).cause == "preempted"
    ended = seen | {"JobState": "COMPLETING", "EndTime": "2026-11-21T08:00:04"}
    assert cause_of(ended, NOW + 5, NOTICE, end_before=NOW + 20).cause == "cancelled"


def test_a_job_that_somebody_requeued_is_not_cancelled():
    ended = record(RECORDS["cancelled"]) | {"JobState": "COMPLETING", "Restarts": "1"}
    assert cause_of(ended, NOW + 1, NOTICE, restarts=0).cause == "requeue"
    assert cause_of(ended, NOW + 1, NOTICE, restarts=1).cause == "cancelled"


def test_a_record_without_times_says_nothing():
    assert (
        cause_of({"JobState": "RUNNING", "EndTime": "Unknown", "TimeLimit": "UNLIMITED"}, NOW, NOTICE).cause == "signal"
    )


def test_fields_of_a_job_may_hold_blanks_and_equal_signs():
    line = "JobId=7 JobName=it's a=b name UserId=root(0) StdOut=/tmp/a b/c=d.log Reason=None NodeList=node[01-02]"
    fields = parse_fields(line)
    assert fields["StdOut"].startswith("/tmp/a b/")
    assert fields["NodeList"] == "node[01-02]"
    assert fields["UserId"] == "root(0)"


# Slurm 22.05: the record of a preempted job, before and after its end.
GRACE = record(RECORDS["preempted"])
SCANCELLED = GRACE | {"JobState": "COMPLETING", "EndTime": "2026-11-21T08:00:01", "Restarts": "0"}
GRACE_OVER = GRACE | {"JobState": "COMPLETING", "EndTime": "Unknown", "Restarts": "1"}


@pytest.mark.parametrize("end_before", [None, NOW + 1, NOW + 20])
def test_a_preempted_job_that_does_not_run_and_was_not_requeued_has_been_cancelled(end_before):
    assert cause_of(GRACE, NOW, NOTICE, end_before=end_before).cause == "preempted"
    assert cause_of(SCANCELLED, NOW + 1, NOTICE, end_before=end_before).cause == "cancelled"
    assert cause_of(GRACE_OVER, NOW + 21, NOTICE, end_before=end_before).cause == "preempted"


@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING", "SUSPENDED", "a word of a later Slurm"])
def test_a_preempted_job_that_lives_is_preempted_whatever_slurm_calls_that(state):
    """SIGNALING: until all nodes have confirmed the signal, so the batch host may well ask before."""
    assert cause_of(GRACE | {"JobState": state}, NOW, NOTICE).cause == "preempted"


def test_where_preemption_cancels_only_an_early_end_tells_a_scancel_from_it():
    at_its_end = GRACE | {"JobState": "COMPLETING"}
    assert cause_of(at_its_end, NOW + 21, NOTICE, end_before=NOW + 20, cancels=True).cause == "preempted"
    assert cause_of(SCANCELLED, NOW + 2, NOTICE, end_before=NOW + 20, cancels=True).cause == "cancelled"


LATER = "a word of a later Slurm"


@pytest.mark.parametrize("fields", [GRACE, record(RECORDS["cancelled"]), record(RECORDS["signal"])], ids=str)
def test_a_state_of_a_later_slurm_never_means_that_somebody_cancelled_the_job(fields):
    """Whatever its times are: a cancelled run is not started again."""
    for end_before in (None, NOW + 600):
        told = cause_of(fields | {"JobState": LATER}, NOW + 30, NOTICE, end_before=end_before, cancels=False)
        assert told.cause in ("preempted", "signal")


@pytest.mark.parametrize(
    ("state", "cause"), [("TIMEOUT", "time limit"), ("NODE_FAIL", "node failure"), ("REVOKED", "signal")]
)
def test_a_job_that_slurm_itself_has_ended_is_not_cancelled(state, cause):
    ended = record(RECORDS["cancelled"]) | {"JobState": state}
    assert cause_of(ended, NOW + 3, NOTICE, end_before=NOW + 600).cause == cause


def test_where_the_mode_of_preemption_is_not_known_a_job_is_not_taken_for_cancelled():
    assert cause_of(SCANCELLED, NOW + 2, NOTICE, cancels=False).cause == "cancelled"
    assert cause_of(SCANCELLED, NOW + 2, NOTICE, cancels=None).cause == "signal"


STEPD = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T08:00:0{} {}***\n"


@pytest.mark.parametrize(
    ("later", "cause"),
    [
        ("", None),  # scancel
        ("DUE TO TIME LIMIT ", "time limit"),
        ("DUE TO THE WEATHER ", "preempted"),
    ],
)
def test_the_last_reason_that_is_known_counts(later, cause):
    log = STEPD.format(1, "DUE TO PREEMPTION ") + STEPD.format(5, later)
    assert cause_in_log(log, "7", NOW) == cause


BY_A_RANK = Drain("signal", "rank 0", NOW)


def test_what_a_rank_could_not_know_of_a_request_is_added():
    assert not is_complete(BY_A_RANK)
    fuller = completed(BY_A_RANK, Cause("preempted", NOW + 20), NOW + 20)
    assert fuller == BY_A_RANK._replace(cause="preempted", deadline=NOW + 20, end=NOW + 20)
    assert is_complete(fuller)


def test_a_cause_that_somebody_named_stays():
    asked = BY_A_RANK._replace(cause="cancelled", by="ada")
    assert completed(asked, Cause("time limit", NOW + 90), NOW + 90).cause == "cancelled"
    assert completed(asked._replace(deadline=NOW + 5), Cause("time limit", NOW + 90), NOW + 90).deadline == NOW + 5


def test_a_record_that_knows_no_more_adds_nothing():
    assert not is_complete(completed(BY_A_RANK, Cause("signal", None), None))


@pytest.mark.parametrize(
    ("named", "at_the_end", "truer"),
    [
        ("signal", "preempted", True),
        ("requeue", "preempted", True),
        ("preempted", "cancelled", True),
        ("time limit", "cancelled", True),
        ("preempted", "requeue", False),
        ("time limit", "preempted", False),
        ("cancelled", "requeue", False),
    ],
)
def test_a_cause_that_was_named_gives_way_only_to_a_cancellation_and_a_requeue_to_a_preemption(
    named, at_the_end, truer
):
    """Else a job that its user cancelled while it saved because of a preemption would start again."""
    assert is_truer(at_the_end, named) is truer
