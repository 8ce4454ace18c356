"""Whatever an attempt left behind is used: srun's words, the end of a log, heartbeats, stacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.host.record.evidence import Death, first_death, last_line, parse_death, verdict_of
from megatron_rl.contract.codes import HEARTBEAT_WAIT
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.run_dir import write_json

TIMED_OUT = "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation to complete"


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    found = RunDir(tmp_path).attempt(2)
    found.heartbeats.mkdir(parents=True)
    found.logs.mkdir(parents=True)
    return found


def send_heartbeat(attempt: Attempt, rank: int, at: float, phase: str, **changes: object) -> None:
    facts = {"rank": rank, "ranks": 2, "host": f"node{rank:02}", "phase": phase, "step": 7, "entered": 9, "every": 10.0}
    write_json(attempt.heartbeat(rank), facts | {"at": at, "written": 1000.0} | changes)


def write_error(attempt: Attempt, rank: int, error: str, **fields: object) -> None:
    facts = {"rank": rank, "host": f"node{rank:02}", "step": 7, "phase": "train", "error": error, "exit_code": 1}
    write_json(attempt.error(rank), facts | fields)


@pytest.mark.parametrize(
    ("line", "death"),
    [
        ("srun: error: node02: task 1: Killed", Death(1, "node02", -9)),
        ("srun: error: node02: task 1: Out Of Memory", Death(1, "node02", -9)),
        ("srun: error: gpu-a.cluster: task 12: Segmentation fault (core dumped)", Death(12, "gpu-a.cluster", -11)),
        ("srun: error: node02: tasks 0-3,5: Exited with exit code 1", Death(0, "node02", 1)),
        ("srun: error: node02: task 3: Exited with exit code 137", Death(3, "node02", -9)),
        ("srun: error: node02: task 3: something new", None),
        ("srun: Job step creation temporarily disabled, retrying", None),
        ("", None),
    ],
)
def test_srun_names_the_rank_that_died(line, death):
    assert parse_death(line) == death


def test_the_first_rank_that_srun_names_took_the_others_along():
    said = "srun: error: node02: task 1: Killed\nsrun: Terminating StepId=1.0\nsrun: error: node01: task 0: Killed\n"
    assert parse_death(said) == Death(1, "node02", -9)


@pytest.mark.parametrize("line", ["srun: error: Node failure on node03", "srun: Force Terminated StepId=1.0"])
def test_ranks_that_slurm_ended_did_not_die_by_themselves(line):
    assert parse_death(f"{line}\nsrun: error: node01: task 0: Killed\n") is None


def test_there_may_be_no_word_of_srun(attempt):
    assert first_death(attempt) is None
    attempt.srun.write_text("srun: error: node02: task 1: Killed\n")
    assert first_death(attempt) == Death(1, "node02", -9)


def test_a_rank_that_was_killed_is_found_where_its_last_heartbeat_was(attempt):
    send_heartbeat(attempt, 1, at=995.0, phase="generate")
    verdict = verdict_of(attempt, {1: -9})
    assert (verdict.rank, verdict.node, verdict.phase, verdict.step) == (1, "node01", "generate", 7)
    assert "SIGKILL" in verdict.error


def test_the_log_of_a_rank_that_died_too_early_for_a_report_has_the_last_word(attempt):
    attempt.log(1).write_text("Traceback ...\nModuleNotFoundError: No module named 'torch'\n\n")
    assert verdict_of(attempt, {1: 1}).error.endswith("its log ends: ModuleNotFoundError: No module named 'torch'")


def test_a_log_may_be_missing_or_huge(attempt):
    assert last_line(attempt, 0) == ""
    attempt.log(0).write_text("x" * 1_000_000)
    assert len(last_line(attempt, 0)) == 300


def test_a_report_needs_no_log(attempt):
    attempt.log(1).write_text("noise\n")
    write_error(attempt, 1, "RuntimeError: boom")
    assert verdict_of(attempt, {1: 1}).error == "RuntimeError: boom"


def test_a_collective_that_timed_out_is_held_against_the_rank_that_did_not_come(attempt):
    write_error(attempt, 0, TIMED_OUT, waited=True)
    send_heartbeat(attempt, 0, at=400.0, phase=HEARTBEAT_WAIT)
    send_heartbeat(attempt, 1, at=300.0, phase="generate")
    attempt.stacks(1).write_text("Thread 1\n")
    verdict = verdict_of(attempt, {0: 1})
    assert (verdict.rank, verdict.node, verdict.phase, verdict.hung) == (1, "node01", "generate", True)
    assert verdict.error.startswith("silent for 700 s while rank 0 waited for it: RuntimeError")
    assert verdict.error.endswith("(stacks: logs/attempt-002/train.1.stacks)")


def test_a_rank_that_died_while_all_showed_their_stacks_is_not_the_one_that_did_not_come(attempt):
    write_error(attempt, 0, TIMED_OUT, waited=True)
    send_heartbeat(attempt, 0, at=400.0, phase=HEARTBEAT_WAIT, ranks=3)
    send_heartbeat(attempt, 1, at=300.0, phase="generate", ranks=3)
    send_heartbeat(attempt, 2, at=400.0, phase=HEARTBEAT_WAIT, ranks=3)
    assert verdict_of(attempt, {2: -11}).rank == 1
    assert verdict_of(attempt, {2: -9}).rank == 2


def test_it_stays_with_the_rank_that_reported_it_where_nobody_stands_out(attempt):
    write_error(attempt, 0, TIMED_OUT, waited=True)
    send_heartbeat(attempt, 0, at=400.0, phase="train")
    send_heartbeat(attempt, 1, at=401.0, phase="train")
    verdict = verdict_of(attempt, {0: 1})
    assert (verdict.rank, verdict.error, verdict.hung) == (0, TIMED_OUT, False)


def test_an_error_of_its_own_is_a_ranks_own_fault(attempt):
    write_error(attempt, 0, "ValueError: bad", waited=False)
    send_heartbeat(attempt, 0, at=400.0, phase=HEARTBEAT_WAIT)
    send_heartbeat(attempt, 1, at=300.0, phase="generate")
    assert verdict_of(attempt, {0: 1}).rank == 0
