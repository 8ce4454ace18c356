"""Real training whose checkpoints are lost, on their way to the disk or there, ends with the record of one whose are
not."""

from __future__ import annotations

import pytest
from login import Login
from records import RECIPE, finish, hold, kill_rank, pin, preempt, record, wait_for_ends, wait_until_held

from megatron_rl.contract.paths import RunDir


@pytest.mark.slow
def test_run_whose_disk_fills_up_in_a_save_resumes_from_the_previous_checkpoint(
    login: Login, undisturbed: RunDir
) -> None:
    """The checkpoint before it stays, the run goes on, and starts again from there when it must."""
    hold(
        login,
        {"attempt": 1, "where": "save", "step": 8, "rank": 1, "then": "finds the disk full"},
        {"attempt": 1, "where": "generate", "step": 10},
    )
    run = login.submit(*RECIPE)
    wait_until_held(run)
    assert run.dir.checkpoint_steps() == [4]
    assert kill_rank(run, 0)
    wait_for_ends(run, 1)
    assert "the checkpoint of step 8 was not saved: rank 1: No space left on device" in run.log()
    finish(run)
    assert run.ends() == [("crashed", None), ("finished", None)]
    assert "resuming after step 4" in run.dir.attempt(2).log(0).read_text()
    assert record(run.dir) == record(undisturbed)


@pytest.mark.slow
def test_run_with_a_damaged_checkpoint_resumes_from_the_previous_one(login: Login, undisturbed: RunDir) -> None:
    pin(login)
    hold(login, {"attempt": 1, "where": "generate", "step": 6})
    run = login.submit(*RECIPE)
    wait_until_held(run)
    urgent = preempt(login, run)
    wait_for_ends(run, 1)
    assert run.dir.checkpoint_steps() == [5, 4]
    shard = next(run.dir.checkpoint(5).glob("__1_*"))
    shard.write_bytes(shard.read_bytes()[:-100])
    login.lab.run("scancel", urgent)
    finish(run)
    assert run.ends() == [("drained", "preempted"), ("finished", None)]
    log = run.dir.attempt(2).log(0).read_text()
    assert "resuming after step 4" in log
    assert "step-000005" in log
    assert record(run.dir) == record(undisturbed)
