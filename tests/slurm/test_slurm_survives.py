"""Real training that is ended in the middle of something ends, in the end, with the record of one left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from json_files import read_json
from lab import Cluster
from login import Login, Run
from records import (
    RECIPE,
    finish,
    hold,
    kill_rank,
    ordinals,
    preempt,
    record,
    resume,
    seconds_to_leave,
    wait_for_ends,
    wait_until_held,
)

from megatron_rl.contract.paths import RunDir

KILL_WAIT = 5.0  # of the lab
SLACK = 6.0  # seconds by which any of Slurm's timings may be off
IN_STEP_6 = {"attempt": 1, "where": "generate", "step": 6}
"""The newest checkpoint is that of step 4."""


@pytest.mark.slow  # a minute; test_slurm_preempted_often does so with stub ranks
def test_run_survives_a_preemption_and_the_loss_of_a_rank(login: Login, undisturbed: RunDir) -> None:
    hold(login, IN_STEP_6, {"attempt": 2, "where": "generate", "step": 8})
    run = login.submit(*RECIPE)
    wait_until_held(run)
    preempt(login, run)
    wait_until_held(run, 2)
    left = next(line for line in run.ledger() if line["event"] == "end")
    assert (left["outcome"], left["cause"], left["step"]) == ("drained", "preempted", 5)
    assert seconds_to_leave(run) <= 20 + KILL_WAIT + SLACK
    assert kill_rank(run, 1)
    finish(run)
    assert run.ends() == [("drained", "preempted"), ("crashed", None), ("finished", None)]
    assert run.field("Restarts") == "2"
    crash = run.ledger()[3]
    assert (crash["rank"], crash["node"]) == (1, read_json(run.dir.attempt(2).nodes)["steps"]["train"][1])
    assert "SIGKILL" in crash["error"]
    assert record(run.dir) == record(undisturbed)

    first, second, _ = json.loads(login.call("mrl", "status", run.dir.root, "--json").stdout)["goodput"]["attempts"]
    assert (first["gpus"], second["gpus"]) == (2, 2)
    assert second["gpu_seconds"]["queue"] > 0 < first["gpu_seconds"]["start-up"]
    assert first["start"] < read_json(run.dir.attempt(1).marks)["ready"] < first["end"]


# Preemption


def is_preempted(login: Login, grace: int = 20, where: str = "generate", saved: tuple[int | None, ...] = (5,)) -> Run:
    """A run that Slurm takes the nodes away from, and that has left. saved: step of the checkpoint that it may leave
    behind."""
    hold(login, {**IN_STEP_6, "where": where, "step": 0 if where == "start" else 6})
    run = login.submit(*RECIPE)
    wait_until_held(run)
    preempt(login, run)
    wait_for_ends(run, 1)
    assert run.ends()[0] == ("drained", "preempted")
    end = next(line for line in run.ledger() if line["event"] == "end")
    assert end.get("step") in saved
    if "seconds" in end:  # else the start that follows has written it
        assert seconds_to_leave(run) <= grace + KILL_WAIT + SLACK
    return run


def has_come_back(run: Run, undisturbed: RunDir) -> None:
    finish(run)
    assert run.ends() == [("drained", "preempted"), ("finished", None)]
    assert run.field("Restarts") == "1"
    assert record(run.dir) == record(undisturbed)


class Scene(NamedTuple):
    """Slurm's part in a preemption. The phases of the ranks are in tests/runs/test_drain_phases.py."""

    where: str
    saved: tuple[int | None, ...]
    """Several where it is a matter of luck."""
    user_signal: bool
    grace: int


@pytest.mark.slow
@pytest.mark.parametrize(
    "scene",
    [
        Scene("start", saved=(None,), user_signal=True, grace=20),
        Scene("generate", saved=(5,), user_signal=False, grace=20),
        Scene("generate", saved=(4, 5), user_signal=True, grace=0),
        Scene("train", saved=(4, 5), user_signal=False, grace=0),
    ],
    ids=lambda scene: f"{scene.where}-{'with' if scene.user_signal else 'without'}-signal-grace-{scene.grace}",
)
def test_preempted_run_resumes_from_any_phase_with_or_without_a_signal(
    login: Login, scene: Scene, undisturbed: RunDir
) -> None:
    changes = {"GraceTime=20": f"GraceTime={scene.grace}"}
    if not scene.user_signal:
        changes["SlurmctldParameters=preempt_send_user_signal\n"] = ""
    with login.lab.configured(changes):
        run = is_preempted(login, scene.grace, scene.where, scene.saved)
        has_come_back(run, undisturbed)  # while srun still reads this configuration


@pytest.fixture
def qos_lab(accounting_lab: Cluster) -> Cluster:
    """A quality of service preempts another one, and partitions do not."""
    text = accounting_lab.conf.read_text()
    accounting_lab.conf.write_text(text.replace("PreemptType=preempt/partition_prio", "PreemptType=preempt/qos"))
    normal = ("set", "GraceTime=20", "PreemptMode=requeue")
    accounting_lab.run("sacctmgr", "-i", "modify", "qos", "normal", *normal)
    accounting_lab.run("sacctmgr", "-i", "add", "qos", "urgent", "set", "Priority=1000", "Preempt=normal")
    accounting_lab.run("sacctmgr", "-i", "modify", "user", "where", "name=root", "set", "qos+=urgent")
    accounting_lab.forget_jobs()  # the controller starts again: it takes this only then
    return accounting_lab


@pytest.mark.slow
def test_run_preempted_by_a_quality_of_service_resumes(qos_lab: Cluster, tmp_path: Path, undisturbed: RunDir) -> None:
    with Login(qos_lab, tmp_path / "home", tmp_path / "share") as login:
        login.profiles["real"]["qos"] = "normal"
        hold(login, IN_STEP_6)
        run = login.submit(*RECIPE)
        wait_until_held(run)
        urgent = preempt(login, run, "--qos=urgent", "--partition=low")
        wait_for_ends(run, 1)
        assert seconds_to_leave(run) <= 20 + KILL_WAIT + SLACK
        qos_lab.run("scancel", urgent)  # it has all nodes of this lab
        has_come_back(run, undisturbed)


# The time limit


@pytest.mark.slow
def test_run_resumes_after_its_time_limit(login: Login, undisturbed: RunDir) -> None:
    login.profiles["real"]["signal_s"] = 40
    hold(login, IN_STEP_6)
    run = login.submit(*RECIPE, "job.time_limit=0:02:00")
    wait_until_held(run)
    wait_for_ends(run, 1)
    assert run.ends() == [("drained", "time limit")]
    assert run.ledger()[-1]["step"] == 5
    finish(run)
    assert run.ends() == [("drained", "time limit"), ("finished", None)]
    assert run.field("Restarts") == "1"
    assert record(run.dir) == record(undisturbed)


# Death


@pytest.mark.slow
def test_rank_that_fails_during_a_drain_is_a_crash_and_the_run_resumes(login: Login, undisturbed: RunDir) -> None:
    here = {"attempt": 1, "where": "train", "step": 6}
    hold(login, {**here, "rank": 0}, {**here, "rank": 1, "then": "fails"})
    run = login.submit(*RECIPE)
    wait_until_held(run)
    preempt(login, run)
    wait_for_ends(run, 1)
    end = run.ledger()[-1]
    assert (end["outcome"], end["rank"]) == ("crashed", 1)
    assert end["error"].startswith("Boom: boom in train (held_rank.py:")
    finish(run)
    assert run.ends()[1:] == [("finished", None)]
    assert record(run.dir) == record(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1], ids=["batch host", "other node"])
def test_run_survives_the_loss_of_a_node(login: Login, victim: int, undisturbed: RunDir) -> None:
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
    lost = next(line for line in run.ledger() if line["event"] == "end")
    assert lost["excluded"] == [nodes[victim]]
    assert nodes[victim] not in run.ledger()[-2]["nodes"]
    assert run.field("Restarts") == "1"
    assert record(run.dir) == record(undisturbed)


# The user


def is_stopped(login: Login) -> Run:
    """A run that is cancelled, with a save, during its sixth step."""
    hold(login, IN_STEP_6)
    run = login.submit(*RECIPE)
    wait_until_held(run)
    login.call("mrl", "cancel", "--drain", run.dir.root)
    assert run.wait() in {"COMPLETED", "CANCELLED"}
    assert run.ends() == [("stopped", "cancelled")]
    assert run.dir.checkpoint_steps()[0] == 5
    return run


@pytest.mark.slow
def test_stopped_run_resumes_on_fewer_nodes(login: Login, undisturbed: RunDir) -> None:
    resumed = resume(login, is_stopped(login), "job.nodes=1")
    finish(resumed)
    assert len(resumed.ledger()[-2]["nodes"]) == 1
    assert ordinals(resumed.dir) == ordinals(undisturbed)
    steps, evaluations = record(resumed.dir)
    assert steps[:5] == record(undisturbed)[0][:5]
    assert [line["step"] for line in evaluations] == [line["step"] for line in record(undisturbed)[1]]
