"""A hanging run ends as a crash that names the rank the others wait for and shows the stacks of all ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from core_helpers import tiny_model
from loop_helpers import Attempt, loop_recipe, prepare
from run_helpers import Supervised, supervised_at_once
from waiting import until

from launcher.host.process.processes import start_time
from launcher.host.record.heartbeats import HangWatch
from megatron_rl.contract.attempt_records import Hang
from megatron_rl.contract.codes import SILENCE_VARIABLE
from megatron_rl.contract.heartbeat_files import read_heartbeat
from megatron_rl.contract.paths import RankFiles
from megatron_rl.contract.records import read

SCRIPTS = {
    "waits,hangs": ("--silence-limit", "2"),
    "beats,stopped": ("--silence-limit", "2"),
    "beats,waits": ("--silence-limit", "3"),
    "hangs": (),
    "collects": (),
    "hangs,consequence": (),
    "consequence,fragile": (),
    "unable": (),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Supervised]]:
    with supervised_at_once(tmp_path_factory.mktemp, SCRIPTS) as started:
        yield started


def test_awaited_rank_is_named_and_both_ranks_show_their_stacks(runs):
    run = runs["waits,hangs"]
    end = run.crash()
    assert (end.outcome, end.rank, end.phase, end.step, end.hung) == ("crashed", 1, "generate", 3, True)
    assert end.node == os.uname().nodename
    assert end.error.endswith("(stacks: logs/attempt-001/train.1.stacks)")
    for rank in (0, 1):
        assert "in hang" in run.attempt.stacks(rank).read_text()
    assert read(Hang, run.attempt.hang).rank == 1


def test_stopped_process_is_named_although_the_other_one_works(runs):
    run = runs["beats,stopped"]
    end = run.crash()
    assert (end.rank, end.hung) == (1, True)
    assert "in hang" in run.attempt.stacks(0).read_text()
    assert start_time(int((run.attempt.folder / "pid.1").read_text())) is None


def test_rank_whose_collective_times_out_names_the_missing_rank(runs):
    end = runs["collects"].crash()
    assert (end.rank, end.phase, end.hung) == (1, "generate", True)
    assert "while rank 0 waited for it: RuntimeError: " in end.error
    assert "Timed out" in end.error


def test_other_ranks_show_their_stacks_when_a_rank_fails(runs):
    run = runs["hangs,consequence"]
    assert run.crash().rank == 1
    assert "in hang" in run.attempt.stacks(0).read_text()


def test_rank_killed_by_the_request_for_its_stack_is_not_the_first_failure(runs):
    end = runs["consequence,fragile"].crash()
    assert (end.rank, end.error) == (0, "RuntimeError: connection closed by peer")


def test_failing_import_is_the_error_although_the_rank_could_not_report_it(runs):
    assert runs["unable"].crash().error.endswith("its log ends: ImportError: No module named 'torch'")


def test_working_rank_keeps_the_run_alive_while_the_other_waits(runs):
    run = runs["beats,waits"]
    first = until(lambda: read_heartbeat(run.attempt.heartbeats, 1), run.logs).at
    until(lambda: time.time() > first + 4, run.logs)
    assert run.process.poll() is None
    assert not run.attempt.hang.exists()


def test_no_hang_is_detected_without_a_limit(runs):
    run = runs["hangs"]
    first = until(lambda: read_heartbeat(run.attempt.heartbeats, 0), run.logs).at
    until(lambda: time.time() > first + 4, run.logs)
    assert run.process.poll() is None


def test_stopped_real_rank_is_named_with_the_stack_of_the_other(tmp_path):
    untaught = tiny_model(init="from-scratch").model_dump()
    recipe = loop_recipe(model=untaught, training={"steps": 1000}, save={"every": 0}, evaluation={"every": 0})
    ranks = Attempt(prepare(tmp_path / "run", recipe), tmp_path / "cache", sabotage=_heartbeats_come_often)
    hangs = HangWatch(ranks.files, limit=3.0)
    try:
        until(lambda: _step_of(ranks.files, 1) >= 1, "a heartbeat of a step")
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        silent = until(lambda: hangs.poll(time.monotonic()), "a rank is silent")
        os.kill(ranks.processes[0].pid, signal.SIGQUIT)
        until(lambda: "train_rl.py" in ranks.files.stacks(0).read_text(), "a stack")
    finally:
        for process in ranks.processes:
            process.kill()
    assert silent.rank == 1
    assert silent.step >= 1  # the step of its last heartbeat


def _step_of(files: RankFiles, rank: int) -> int:
    beat = read_heartbeat(files.heartbeats, rank)
    return beat.step if beat else 0


def _heartbeats_come_often(rank: int) -> None:
    os.environ[SILENCE_VARIABLE] = "3"
