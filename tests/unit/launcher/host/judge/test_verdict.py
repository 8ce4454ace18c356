"""How an attempt ended is judged by error files, then rank 0's outcome, and only then by exit codes."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.host.judge.verdict import AttemptEvidence, RankExit, Verdict, verdict_of
from megatron_rl.contract.attempt_records import Drain, Hang, Heartbeat, Outcome, RankError
from megatron_rl.contract.codes import CRASHED, DRAINED, FINISHED, HEARTBEAT_WAIT, LOST, MISCONFIGURED, SIGNALLED

ERROR = RankError(1, "node01", 7, "train", "boom")
TIMED_OUT = ERROR._replace(rank=0, host="node00", error="RuntimeError: Timed out waiting 600000ms", waited=True)
HANG = Hang(3, "node05", "generating", 41, 1800.4, 0.0)
SAVED, EMPTY = Outcome(DRAINED, 3), Outcome(DRAINED)
BY_A_RANK = Drain(SIGNALLED, "a request to rank 0", 0.0)
BY_US = Drain(SIGNALLED, "SIGUSR1 to the batch host", 0.0)
CODES = st.dictionaries(st.integers(0, 3), st.sampled_from([0, 1, 75, 78, -9, -15]), min_size=1)


def exits(codes: dict[int, int]) -> list[RankExit]:
    return [RankExit(rank, code) for rank, code in codes.items()]


def beat(rank: int, at: float, phase: str, ranks: int = 2) -> Heartbeat:
    return Heartbeat(rank, ranks, f"node{rank:02}", phase, 7, 9, at, 1000.0, 10.0)


def blamed(**evidence: object) -> tuple[int | None, str | None]:
    verdict = verdict_of(AttemptEvidence(**evidence))
    return verdict.rank, verdict.error


@given(
    codes=CODES.filter(lambda codes: -9 not in codes.values()),
    outcome=st.sampled_from([None, SAVED]),
)
def test_an_error_file_outweighs_everything(codes, outcome):
    verdict = verdict_of(AttemptEvidence(errors=[ERROR], outcome=outcome, exits=exits(codes)))
    assert verdict[:4] == (CRASHED, 7, "boom", 1)


@given(codes=CODES, kind=st.sampled_from([DRAINED, FINISHED]), drain=st.sampled_from([None, BY_A_RANK, BY_US]))
def test_a_recorded_outcome_outweighs_the_exit_codes(codes, kind, drain):
    evidence = AttemptEvidence(outcome=Outcome(kind, 3), exits=exits(codes), drain=drain, late="cleaned up")
    assert verdict_of(evidence)[:4] == (kind, 3, None, None)


@given(codes=CODES)
def test_exit_codes_alone_never_mean_success(codes):
    assert verdict_of(AttemptEvidence(exits=exits(codes))).outcome in (CRASHED, MISCONFIGURED)


def test_the_rank_that_failed_first_is_named():
    rank, error = blamed(exits=exits({2: -signal.SIGKILL, 0: 1}))
    assert rank == 2
    assert "SIGKILL (often: out of memory)" in error


def test_the_first_error_reported_is_the_cause_and_what_the_others_say_its_consequence():
    consequence = ERROR._replace(rank=0, error="RuntimeError: Connection closed by peer")
    assert blamed(errors=[ERROR, consequence]) == (1, "boom")


def test_ranks_that_we_ended_are_not_blamed():
    assert blamed(late="Ctrl-C; no save within 60 s", code=-9) == (
        None,
        "stopped before it had saved: Ctrl-C; no save within 60 s",
    )


def test_who_was_asked_to_leave_and_had_to_be_ended_did_not_leave_in_order():
    late = AttemptEvidence(drain=BY_US, late="Ctrl-C; no save within 60 s", code=-9)
    assert verdict_of(late)[:3] == (CRASHED, None, "stopped before it had saved: Ctrl-C; no save within 60 s")
    assert verdict_of(late._replace(late=None)).outcome == DRAINED, "before there was anything to save"


def test_a_killed_rank_is_the_cause_of_the_errors_its_sisters_report():
    sister = ERROR._replace(rank=0, error="RuntimeError: Connection closed by peer")
    verdict = verdict_of(AttemptEvidence(errors=[sister], exits=exits({1: -signal.SIGKILL, 0: 1})))
    assert (verdict.outcome, verdict.rank, verdict.step) == (CRASHED, 1, 7)
    assert "SIGKILL" in verdict.error


QUOTA = "OSError: [Errno 122] Disk quota exceeded: '/runs/mine/metrics.jsonl'"
LOST_PEER = ERROR._replace(rank=1, error="PeerLost: rank 0 closed its connection: it has ended")


def test_a_rank_whose_used_up_quota_kept_it_from_reporting_is_the_cause_of_what_its_peers_report():
    rank, error = blamed(errors=[LOST_PEER], exits=exits({1: 1, 0: 1}), last_lines={0: QUOTA, 1: LOST_PEER.error})
    assert (rank, error) == (0, f"it left with exit code 1 without an error report; its log ends: {QUOTA}")
    full = "Disk quota exceeded: '/runs/mine'"
    rank, error = blamed(errors=[LOST_PEER], exits=exits({1: 1, 0: 1}), last_lines={0: ""}, unwritable=full)
    assert (rank, error) == (0, f"{full}; it left with exit code 1 without a report")


@pytest.mark.parametrize(
    ("first", "codes", "read"),
    [(ERROR, {1: 1, 0: 1}, 2), (LOST_PEER, {1: 1, 0: -15}, 2), (LOST_PEER, {1: 1}, 2), (LOST_PEER, {1: 1, 0: 1}, 0)],
    ids=["the report is about something else", "it was ended", "nobody else failed", "its report was not looked for"],
)
def test_otherwise_the_first_report_counts(first, codes, read):
    last_lines = dict.fromkeys(range(read), "x")
    assert blamed(errors=[first], exits=exits(codes), last_lines=last_lines) == (1, first.error)


def test_an_abort_may_be_the_consequence_of_another_ranks_error():
    assert blamed(errors=[ERROR], exits=exits({1: 1, 0: -signal.SIGABRT})) == (1, "boom")


def test_a_rank_that_was_killed_is_found_where_its_last_heartbeat_was():
    evidence = AttemptEvidence(exits=exits({1: -9}), heartbeats=[beat(1, 995.0, "generate")])
    assert verdict_of(evidence)._replace(error=None) == Verdict(CRASHED, 7, None, 1, "node01", "generate")


def test_the_log_of_a_rank_that_died_too_early_for_a_report_has_the_last_word():
    _, error = blamed(exits=exits({1: 1}), last_lines={1: "ImportError: no torch"})
    assert error == "it left with exit code 1 without an error report; its log ends: ImportError: no torch"


def test_a_rank_that_hung_is_blamed_and_not_those_that_were_ended_for_it():
    evidence = AttemptEvidence(
        errors=[ERROR], exits=exits({1: 1, 2: -9}), hang=HANG, stacks={3: "logs/attempt-002/train.3.stacks"}
    )
    error = "silent for 1800 s (stacks: logs/attempt-002/train.3.stacks)"
    assert verdict_of(evidence) == Verdict(CRASHED, 41, error, 3, "node05", "generating", True)


def test_the_reason_of_an_early_end_stands_in_the_ledger():
    verdict = verdict_of(AttemptEvidence(outcome=Outcome(FINISHED, 42, "the loss has not fallen")))
    assert (verdict.step, verdict.why, verdict.error) == (42, "the loss has not fallen", None)


def test_ranks_that_got_as_far_as_an_outcome_did_not_hang():
    assert verdict_of(AttemptEvidence(outcome=Outcome(FINISHED, 42), hang=HANG)).outcome == FINISHED


def test_an_error_says_where_and_in_what():
    assert verdict_of(AttemptEvidence(errors=[ERROR])) == Verdict(CRASHED, 7, "boom", 1, "node01", "train")


def test_a_collective_that_timed_out_is_held_against_the_rank_that_did_not_come():
    beats = [beat(0, 400.0, HEARTBEAT_WAIT), beat(1, 300.0, "generate")]
    evidence = AttemptEvidence(errors=[TIMED_OUT], heartbeats=beats, exits=exits({0: 1}), stacks={1: "here"})
    verdict = verdict_of(evidence)
    assert (verdict.rank, verdict.node, verdict.phase, verdict.hung) == (1, "node01", "generate", True)
    assert verdict.error.startswith("silent for 700 s while rank 0 waited for it: RuntimeError")
    assert verdict.error.endswith("(stacks: here)")


def test_of_all_that_report_a_time_out_none_is_held_to_be_the_one_that_did_not_come():
    """Ranks that have ended over it are silent by now."""
    second = TIMED_OUT._replace(rank=2, host="node02")
    gone = beat(2, 300.0, HEARTBEAT_WAIT, 3)._replace(written=900.0)
    beats = [beat(0, 400.0, HEARTBEAT_WAIT, 3), beat(1, 300.0, "generate", 3), gone]
    assert blamed(errors=[TIMED_OUT, second], heartbeats=beats, exits=exits({0: 1, 2: 1}))[0] == 1


def test_a_rank_that_died_while_all_showed_their_stacks_is_not_the_one_that_did_not_come():
    beats = [beat(0, 400.0, HEARTBEAT_WAIT, 3), beat(1, 300.0, "generate", 3), beat(2, 400.0, HEARTBEAT_WAIT, 3)]
    assert blamed(errors=[TIMED_OUT], heartbeats=beats, exits=exits({2: -11}))[0] == 1
    assert blamed(errors=[TIMED_OUT], heartbeats=beats, exits=exits({2: -9}))[0] == 2


def test_ranks_that_nccl_aborted_waited_for_the_one_that_did_not_come():
    """Its watchdog leaves no error file."""
    beats = [beat(0, 400.0, HEARTBEAT_WAIT, 3), beat(1, 300.0, "generate", 3), beat(2, 400.0, HEARTBEAT_WAIT, 3)]
    verdict = verdict_of(AttemptEvidence(heartbeats=beats, exits=exits({0: -6, 2: -6, 1: -15})))
    assert (verdict.rank, verdict.node, verdict.phase, verdict.hung) == (1, "node01", "generate", True)
    assert verdict.error.startswith("silent for 700 s before rank 0 was killed by SIGABRT")
    nobody = [beat(0, 400.0, "train"), beat(1, 401.0, "train")]
    assert verdict_of(AttemptEvidence(heartbeats=nobody, exits=exits({0: -6}))).rank == 0
    assert verdict_of(AttemptEvidence(exits=exits({0: -6}))).rank == 0


COLLECTIVE = "WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=4) ran for 600010 milliseconds before timing out."
LOST_CONNECTION = ERROR._replace(error="RuntimeError: Connection closed by peer")


def test_what_nccls_watchdog_said_comes_before_the_lost_connections_of_the_others():
    """The stacks are consequences of its abort."""
    aborted = AttemptEvidence(errors=[LOST_CONNECTION], exits=exits({0: -6, 1: 1}), timed_out={0: COLLECTIVE})
    told = Verdict(CRASHED, None, "a collective timed out: " + COLLECTIVE, rank=0)
    assert verdict_of(aborted) == told
    nobody = [beat(0, 400.0, "train"), beat(1, 401.0, "train")]
    assert verdict_of(aborted._replace(heartbeats=nobody)) == told._replace(step=7, phase="train"), (
        "no node is to blame"
    )
    beats = [beat(0, 400.0, HEARTBEAT_WAIT, 3), beat(1, 401.0, HEARTBEAT_WAIT, 3), beat(2, 300.0, "generate", 3)]
    verdict = verdict_of(aborted._replace(heartbeats=beats))
    assert (verdict.rank, verdict.node, verdict.hung) == (2, "node02", True)
    assert verdict.error.endswith(COLLECTIVE)


@pytest.mark.parametrize(
    ("evidence", "rank"),
    [
        (AttemptEvidence(errors=[LOST_CONNECTION], exits=exits({1: 1, 0: -6})), 1),
        (AttemptEvidence(errors=[ERROR._replace(rank=0)], exits=exits({0: -6})), 0),
        (AttemptEvidence(outcome=SAVED, exits=exits({0: -6})), None),
    ],
    ids=["another rank ended before", "it reported itself", "all had left in order"],
)
def test_it_does_not_where_something_else_came_before_the_abort(evidence, rank):
    verdict = verdict_of(evidence._replace(timed_out={0: COLLECTIVE}))
    assert (verdict.rank, "timed out" in (verdict.error or "")) == (rank, False)


def test_it_stays_with_the_rank_that_reported_it_where_nobody_stands_out():
    beats = [beat(0, 400.0, "train"), beat(1, 401.0, "train")]
    verdict = verdict_of(AttemptEvidence(errors=[TIMED_OUT], heartbeats=beats, exits=exits({0: 1})))
    assert (verdict.rank, verdict.error, verdict.hung) == (0, TIMED_OUT.error, False)


def test_an_error_of_its_own_is_a_ranks_own_fault():
    beats = [beat(0, 400.0, HEARTBEAT_WAIT), beat(1, 300.0, "generate")]
    assert blamed(errors=[TIMED_OUT._replace(waited=False)], heartbeats=beats)[0] == 0


# The rank that ended first is the cause where the others took srun's SIGTERM for a request of somebody.
@pytest.mark.parametrize("outcome", [None, EMPTY], ids=["nothing recorded", "left with nothing saved"])
def test_a_request_that_only_ranks_know_of_does_not_explain_a_death(outcome):
    verdict = verdict_of(AttemptEvidence(outcome=outcome, exits=[RankExit(1, 1, "n2")], drain=BY_A_RANK, code=1))
    assert (verdict.outcome, verdict.rank, verdict.node) == (CRASHED, 1, "n2")


@pytest.mark.parametrize(
    ("first", "drain", "outcome"),
    [(75, BY_A_RANK, EMPTY), (1, BY_US, EMPTY), (1, BY_A_RANK, SAVED), (1, Drain("preempted", "x", 0.0), EMPTY)],
)
def test_but_a_drain_is_one_where_anybody_else_knows_of_it_or_all_was_saved(first, drain, outcome):
    assert verdict_of(AttemptEvidence(outcome=outcome, exits=[RankExit(1, first)], drain=drain)).outcome == DRAINED


def test_ranks_asked_to_leave_that_were_gone_before_they_could_save_have_drained():
    assert verdict_of(AttemptEvidence(drain=BY_US, code=-9)) == Verdict(DRAINED)
    assert verdict_of(AttemptEvidence(drain=BY_US)) == Verdict(DRAINED)
    assert verdict_of(AttemptEvidence(drain=BY_US, code=75)).outcome == CRASHED, "75 without an outcome"


def test_what_cannot_be_read_is_not_taken_for_absent():
    assert verdict_of(AttemptEvidence(unreadable_outcome="is empty")).outcome == DRAINED
    assert verdict_of(AttemptEvidence(unreadable_outcome="is empty")).step is None
    rank, error = blamed(unreadable_errors={2: "is torn"}, outcome=SAVED)
    assert (rank, error) == (2, "its error report cannot be read: is torn")


def test_where_nobody_saw_the_end_the_ranks_words_count_and_else_it_is_lost():
    assert verdict_of(AttemptEvidence(unseen="its script was killed")) == Verdict(LOST, None, "its script was killed")
    assert verdict_of(AttemptEvidence(unseen="its script was killed", outcome=SAVED)).outcome == DRAINED


@pytest.mark.parametrize(("unready", "error"), [(None, "the steps could not be started"), ("no image", "no image")])
def test_an_attempt_that_never_began_says_why(unready, error):
    assert blamed(unready=unready) == (None, error)


@pytest.mark.parametrize(("other", "node"), [("python3: No such file", None), ("sh: No such file", "n1"), (None, "n1")])
def test_a_rank_that_never_began_is_its_nodes_fault_unless_another_node_says_the_same(other, node):
    reasons = {0: "execve(): python3: No such file"} | ({1: f"execve(): {other}"} if other else {})
    verdict = verdict_of(AttemptEvidence(exits=[RankExit(0, 2, "n1"), RankExit(1, 2, "n2")], not_started=reasons))
    assert verdict == Verdict(CRASHED, None, "it could not be started: execve(): python3: No such file", 0, node)


def test_ranks_that_a_full_disk_kept_from_reporting_died_of_it_at_the_step_they_had_come_to():
    full = "No space left on device: '/runs/it/attempts/001'"
    cut = AttemptEvidence(exits=[RankExit(0, 1, "n1")], last_lines={0: "2026-11-25 WARN"}, unwritable=full)
    verdict = verdict_of(cut._replace(heartbeats=[beat(0, 900.0, "starting")._replace(step=0)], trained=49))
    assert (verdict.step, verdict.phase) == (50, None)
    assert verdict.error == f"{full}; it left with exit code 1 without a report"


@pytest.mark.parametrize(("trained", "step", "phase"), [(None, 7, "train"), (6, 7, "train"), (7, 8, None)])
def test_a_death_is_at_the_step_that_the_timeline_has_come_to(trained, step, phase):
    verdict = verdict_of(AttemptEvidence(exits=exits({0: -9}), heartbeats=[beat(0, 9.0, "train")], trained=trained))
    assert (verdict.step, verdict.phase) == (step, phase)


def test_a_step_that_failed_on_the_only_node_says_where():
    assert verdict_of(AttemptEvidence(unready="no image", unready_host="n1")).node == "n1"


LACKS = "ModuleNotFoundError: No module named 'megatron'"


@pytest.mark.parametrize(
    ("said", "in_container", "outcome"),
    [
        (LACKS, True, MISCONFIGURED),
        ("rank: 1: exec: python3: not found", True, MISCONFIGURED),
        (LACKS, False, CRASHED),  # of a file system that is missing on this node
        ("rank: 1: exec: /shared/venv/bin/python: not found", True, CRASHED),
        ("ModuleNotFoundError: No module named 'megatron_rl'", True, CRASHED),
        ("RuntimeError: boom", True, CRASHED),
    ],
)
def test_what_is_not_in_the_image_is_on_no_other_node_either(said, in_container, outcome):
    unread = AttemptEvidence(exits=[RankExit(0, 1)], last_lines={0: said}, in_container=in_container)
    reported = AttemptEvidence(errors=[ERROR._replace(error=said)], in_container=in_container)
    assert (verdict_of(unread).outcome, verdict_of(reported).outcome) == (outcome, outcome)
