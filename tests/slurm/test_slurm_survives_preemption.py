"""Real training that is preempted in the middle of something ends with the record of one that was left alone."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from lab import Cluster
from login import Login, Run
from records import RECIPE, finish, hold, preempt, record, seconds_to_leave, wait_for_ends, wait_until_held

KILL_WAIT = 5.0  # of the lab
SLACK = 6.0  # seconds by which any of Slurm's timings may be off


class Scene(NamedTuple):
    where: str
    step: int
    saved: tuple[int | None, ...]
    """Step of the checkpoint that the attempt leaves behind, if it makes one; several where it is a matter of luck."""
    user_signal: bool = True
    grace: int = 20

    def __str__(self) -> str:
        return f"{self.where}-{'with' if self.user_signal else 'without'}-signal-grace-{self.grace}"


SCENES = [
    Scene("generate", 6, saved=(5,)),
    *(
        pytest.param(scene, marks=pytest.mark.slow)
        for scene in [
            Scene("start", 0, saved=(None,)),
            Scene("teach", 0, saved=(None,)),
            Scene("log-probs", 6, saved=(5,)),
            Scene("train", 6, saved=(5,)),
            Scene("save", 4, saved=(8,)),  # the next one waits for it
            Scene("evaluate", 4, saved=(4,)),
            Scene("generate", 6, saved=(5,), user_signal=False),
            Scene("generate", 6, saved=(4, 5), grace=0),
            Scene("train", 6, saved=(4, 5), user_signal=False, grace=0),
        ]
    ),
]


@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_a_preempted_run_goes_on(login: Login, scene: Scene, undisturbed: Run) -> None:
    hold(login, {"attempt": 1, "where": scene.where, "step": scene.step})
    changes = {"GraceTime=20": f"GraceTime={scene.grace}"}
    if not scene.user_signal:
        changes["SlurmctldParameters=preempt_send_user_signal\n"] = ""
    with login.lab.configured(changes):
        run = login.submit(*RECIPE)
        wait_until_held(run)
        preempt(login, run)
        wait_for_ends(run, 1)
    (left,) = run.ends()
    assert left == ("drained", "preempted")
    (end,) = [line for line in run.ledger() if line["event"] == "end"]
    assert end["step"] in scene.saved
    if "seconds" in end:  # else the start that follows has written it
        assert seconds_to_leave(run) <= scene.grace + KILL_WAIT + SLACK
    finish(run)
    assert run.ends() == [left, ("finished", None)]
    assert run.field("Restarts") == "1"
    assert record(run) == record(undisturbed)


@pytest.mark.slow
def test_two_preemptions_before_the_first_checkpoint(login: Login, undisturbed: Run) -> None:
    # The second attempt has nothing left to generate for step 1: what the first one had is not thrown away.
    hold(login, *({"attempt": n, "where": where, "step": 1} for n, where in ((1, "generate"), (2, "log-probs"))))
    run = login.submit(*RECIPE)
    for attempt in (1, 2):
        wait_until_held(run, attempt)
        preempt(login, run)
        wait_for_ends(run, attempt)
        assert run.dir.checkpoint_steps() == []
    finish(run)
    assert run.ends() == [("drained", "preempted"), ("drained", "preempted"), ("finished", None)]
    assert run.field("Restarts") == "2"
    assert record(run) == record(undisturbed)


@pytest.mark.slow
def test_a_run_comes_back_after_its_time_limit(login: Login, undisturbed: Run) -> None:
    login.profiles["real"]["signal_s"] = 40
    hold(login, {"attempt": 1, "where": "generate", "step": 6})
    run = login.submit(*RECIPE, "job.time_limit=0:02:00")
    wait_until_held(run)
    wait_for_ends(run, 1)
    assert run.ends() == [("drained", "time limit")]
    assert run.ledger()[-1]["step"] == 5
    finish(run)
    assert run.ends() == [("drained", "time limit"), ("finished", None)]
    assert run.field("Restarts") == "1"
    assert record(run) == record(undisturbed)


@pytest.fixture
def qos_lab(accounting_lab: Cluster) -> Cluster:
    """Where a quality of service preempts another one, and partitions do not."""
    text = accounting_lab.conf.read_text()
    accounting_lab.conf.write_text(text.replace("PreemptType=preempt/partition_prio", "PreemptType=preempt/qos"))
    normal = ("set", "GraceTime=20", "PreemptMode=requeue")
    accounting_lab.run("sacctmgr", "-i", "modify", "qos", "normal", *normal)
    accounting_lab.run("sacctmgr", "-i", "add", "qos", "urgent", "set", "Priority=1000", "Preempt=normal")
    accounting_lab.run("sacctmgr", "-i", "modify", "user", "where", "name=root", "set", "qos+=urgent")
    accounting_lab.forget_jobs()  # the controller starts again: it takes this only then
    return accounting_lab


@pytest.mark.slow
def test_a_run_preempted_by_a_quality_of_service_goes_on(qos_lab: Cluster, tmp_path: Path, undisturbed: Run) -> None:
    login = Login(qos_lab, tmp_path / "home", tmp_path / "share")
    login.profiles["real"]["qos"] = "normal"
    hold(login, {"attempt": 1, "where": "generate", "step": 6})
    run = login.submit(*RECIPE)
    wait_until_held(run)
    urgent = preempt(login, run, "--qos=urgent", "--partition=low")
    wait_for_ends(run, 1)
    assert seconds_to_leave(run) <= 20 + KILL_WAIT + SLACK
    qos_lab.run("scancel", urgent)  # it has all nodes of this lab
    finish(run)
    assert run.ends() == [("drained", "preempted"), ("finished", None)]
    assert run.field("Restarts") == "1"
    assert record(run) == record(undisturbed)
