"""Real training that is hit at random moments, again and again, ends with the record of one that was left alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from lab import wait_until
from login import Login, Run
from records import RECIPE, STEPS, WAIT, hold, kill_rank, preempt, record, resume

from megatron_rl.contract.paths import RunDir

BLOWS = 20
START_UP_S = 10.0
"""Seconds that an attempt takes beside its steps, or more."""
PAUSES = ({"where": "generate", "seconds": 0.7}, {"where": "train", "seconds": 0.5})
"""Steps take long enough to be hit in."""
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}

Undo = Callable[[], object]


def kill_batch_script(login: Login, run: Run) -> Undo:
    login.lab.run("scancel", "--signal=KILL", "--batch", run.job, check=False)
    return lambda: None


def kill_a_rank(login: Login, run: Run) -> Undo:
    wait_until("there is a rank to kill", lambda: kill_rank(run, 1) or not is_under_way(run), WAIT)
    return lambda: None


def take_the_nodes(login: Login, run: Run) -> Undo:
    urgent = preempt(login, run)
    return lambda: login.lab.run("scancel", urgent)


def kill_a_node(login: Login, run: Run) -> Undo:
    node = run.ledger()[-1]["nodes"][1]
    login.lab.kill_node(node)
    return lambda: login.lab.restart_node(node)


WEAPONS = (kill_batch_script, kill_a_rank, take_the_nodes, kill_a_node)


def has_ended(run: Run) -> bool:
    """The job: it does not start again by itself."""
    return run.state() in ENDED


def is_under_way(run: Run) -> bool:
    """An attempt of the job's."""
    return run.state() == "RUNNING" and [line["event"] for line in run.ledger()[-1:]] == ["start"]


def wait_until_over(run: Run, attempt: int) -> None:
    def over() -> bool:
        return has_ended(run) or run.state() == "PENDING" or run.dir.last_attempt() > attempt

    wait_until(f"attempt {attempt} of {run.dir.root} is over", over, WAIT)


def strike(login: Login, run: Run, after_s: float, weapon: Callable[[Login, Run], Undo]) -> bool:
    """Hit the attempt in progress, and see it end. Whether it was still there to be hit."""
    attempt = run.dir.last_attempt()
    time.sleep(after_s)
    hit = is_under_way(run)
    undo = weapon(login, run) if hit else None
    wait_until_over(run, attempt)
    if undo is not None:
        undo()
    return hit


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_run_with_random_faults_ends_as_if_undisturbed(login: Login, undisturbed: RunDir) -> None:
    chance, blows = random.Random(4), 0
    longest = START_UP_S + STEPS * sum(pause["seconds"] for pause in PAUSES)
    hold(login, *PAUSES)
    while blows < BLOWS:
        run = login.submit(*RECIPE)
        while not run.dir.done.exists():
            wait_until("an attempt begins", lambda run=run: has_ended(run) or is_under_way(run), WAIT)
            if has_ended(run):
                run = run if run.dir.done.exists() else resume(login, run)
            elif blows < BLOWS:
                blows += strike(login, run, chance.uniform(0.0, longest), chance.choice(WEAPONS))
            else:
                wait_until_over(run, run.dir.last_attempt())
        assert record(run.dir) == record(undisturbed), run.ends()
