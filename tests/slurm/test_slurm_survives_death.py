"""Real training of which something dies without a word ends with the record of one that was left alone."""

from __future__ import annotations

import pytest
from login import Login, Run
from records import RECIPE, finish, hold, kill_rank, preempt, record, wait_for_ends, wait_until_held

IN_STEP_6 = {"attempt": 1, "where": "generate", "step": 6}
"""The newest checkpoint is that of step 4."""


def test_one_rank_is_killed(login: Login, undisturbed: Run) -> None:
    hold(login, IN_STEP_6)
    run = login.submit(*RECIPE)
    wait_until_held(run)
    assert kill_rank(run, 1)
    finish(run)
    assert run.ends() == [("crashed", None), ("finished", None)]
    assert run.field("Restarts") == "1"
    assert record(run) == record(undisturbed)


@pytest.mark.slow
def test_one_rank_fails_while_the_others_leave(login: Login, undisturbed: Run) -> None:
    here = {"attempt": 1, "where": "train", "step": 6}
    hold(login, {**here, "rank": 0}, {**here, "rank": 1, "then": "fails"})
    run = login.submit(*RECIPE)
    wait_until_held(run)
    preempt(login, run)
    wait_for_ends(run, 1)
    end = run.ledger()[-1]
    assert (end["outcome"], end["rank"], end["error"]) == ("crashed", 1, "Boom: boom in train")
    finish(run)
    assert run.ends()[1:] == [("finished", None)]
    assert record(run) == record(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1], ids=["batch host", "other node"])
def test_a_node_dies(login: Login, victim: int, undisturbed: Run) -> None:
    hold(login, IN_STEP_6)
    run = login.submit(*RECIPE)
    wait_until_held(run)
    nodes = run.ledger()[-1]["nodes"]
    login.lab.kill_node(nodes[victim])
    try:
        finish(run)
    finally:
        login.lab.restart_node(nodes[victim])
    assert run.ends() == [("lost", "node failure"), ("finished", None)]
    assert nodes[victim] not in run.ledger()[-2]["nodes"]
    assert run.field("Restarts") == "1"
    assert record(run) == record(undisturbed)
