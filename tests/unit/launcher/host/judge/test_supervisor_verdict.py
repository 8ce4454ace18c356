"""How an attempt ended is judged by error files, then rank 0's outcome, and only then by exit codes."""

from __future__ import annotations

import signal

from hypothesis import given
from hypothesis import strategies as st

from launcher.host.judge.verdict import CRASHED, judge

ERROR = {"rank": 1, "step": 7, "error": "boom", "exit_code": 1}
CODES = st.dictionaries(st.integers(0, 3), st.sampled_from([0, 1, 75, 78, -9, -15]), min_size=1)


@given(
    exits=CODES.filter(lambda exits: -9 not in exits.values()),
    outcome=st.sampled_from([None, {"outcome": "drained", "step": 3}]),
)
def test_an_error_file_outweighs_everything(exits, outcome):
    assert judge([ERROR], outcome, exits, None)[:4] == ("crashed", 7, "boom", 1)


@given(exits=CODES, kind=st.sampled_from(["drained", "finished"]))
def test_a_recorded_outcome_outweighs_the_exit_codes(exits, kind):
    assert judge([], {"outcome": kind, "step": 3}, exits, "cleaned up")[:4] == (kind, 3, None, None)


@given(exits=CODES)
def test_exit_codes_alone_never_mean_success(exits):
    assert judge([], None, exits, None).outcome in ("crashed", "misconfigured")


def test_the_rank_that_failed_first_is_named():
    verdict = judge([], None, {2: -signal.SIGKILL, 0: 1}, None)
    assert verdict.rank == 2
    assert "SIGKILL (often: out of memory)" in verdict.error


def test_ranks_that_we_ended_are_not_blamed():
    verdict = judge([], None, {}, "Ctrl-C; no save within 60 s")
    assert verdict.rank is None
    assert "no save within 60 s" in verdict.error


def test_a_killed_rank_is_the_cause_of_the_errors_its_sisters_report():
    sister = {"rank": 0, "step": 7, "error": "RuntimeError: Connection closed by peer", "exit_code": 1}
    verdict = judge([sister], None, {1: -signal.SIGKILL, 0: 1}, None)
    assert (verdict.outcome, verdict.rank, verdict.step) == (CRASHED, 1, 7)
    assert "SIGKILL" in verdict.error


def test_an_abort_may_be_the_consequence_of_another_ranks_error():
    cause = {"rank": 0, "step": 7, "error": "ValueError: bad", "exit_code": 1}
    verdict = judge([cause], None, {0: 1, 1: -signal.SIGABRT}, None)
    assert (verdict.rank, verdict.error) == (0, "ValueError: bad")


HANG = {"rank": 3, "host": "node05", "phase": "generating", "step": 41, "silent_s": 1800.4}


def test_a_rank_that_hung_is_blamed_and_not_those_that_were_ended_for_it():
    verdict = judge([ERROR], None, {1: 1, 2: -9}, "another rank had failed", HANG)
    assert verdict == ("crashed", 41, "silent for 1800 s", 3, "node05", "generating", True)


def test_ranks_that_got_as_far_as_an_outcome_did_not_hang():
    assert judge([], {"outcome": "finished", "step": 42}, {}, None, HANG).outcome == "finished"


def test_an_error_says_where_and_in_what():
    verdict = judge([ERROR | {"host": "node03", "phase": "training"}], None, {}, None)
    assert (verdict.node, verdict.phase, verdict.hung) == ("node03", "training", False)
