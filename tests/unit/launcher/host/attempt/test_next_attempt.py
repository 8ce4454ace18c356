"""An attempt takes over requests and nodes from the one before it in the same job."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.host.attempt import own, slurm_run
from launcher.host.attempt import runner as runner_module
from launcher.host.attempt.begin import begin_attempt, next_attempt
from launcher.host.attempt.job_context import JobContext, JobRefused
from launcher.host.attempt.prepare import AskedToLeave, Checks, NotReady, Preparation
from launcher.host.attempt.runner import AttemptRunner
from launcher.host.attempt.slurm_job import SlurmJob
from launcher.host.attempt.slurm_run import without_dead_nodes
from launcher.host.attempt.slurm_steps import SlurmSteps
from launcher.host.judge.nodes import NotEnoughNodes
from launcher.host.judge.policy import BY_US, STAYS
from launcher.host.process.signals import Signals
from launcher.host.slurm import call, queries
from launcher.host.slurm.call import SlurmRefused, SlurmSilent
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, Drain, NodeAssignment, NodeHealth, Requeued
from megatron_rl.contract.paths import OF_REPLICAS, Attempt, RunDir
from megatron_rl.contract.plan_records import PlanRecord, PlanRole
from megatron_rl.contract.records import ABSENT, append, if_readable, read, write
from megatron_rl.contract.run_records import Owner, RunIdentity

NO_CHECKS, HEALTH = Checks(), Checks(health=True)
PLAN = PlanRecord(2, 1, 1, [PlanRole("train", 0, 0, None, 1)])


@pytest.fixture
def context(tmp_path: Path) -> JobContext:
    """Job 7 on three nodes; attempt 1 is about to end."""
    run = RunDir(tmp_path)
    run.attempt(1).folder.mkdir(parents=True)
    append(run.attempts_ledger, AttemptStart(1, 10.0, job_id="7"))
    write(run.plan, PLAN)
    return JobContext(run, "lab", "7", ["n1", "n2", "n3"])


def end(context: JobContext, then: str, **more: Any) -> None:
    line = AttemptEnd(1, 20.0, "crashed", job_id="7", then=then)._replace(**more)
    append(context.run.attempts_ledger, line)


def begun(context: JobContext) -> Attempt:
    attempt = next_attempt(context)
    begin_attempt(context, attempt)
    return attempt


@pytest.mark.parametrize(
    ("asked_at", "then", "leaves"), [(21.0, STAYS, True), (19.0, STAYS, False), (21.0, BY_US, False)]
)
def test_a_request_between_two_attempts_of_an_allocation_is_for_the_second(
    context: JobContext, asked_at: float, then: str, leaves: bool
) -> None:
    end(context, then)
    write(context.run.attempt(1).drain, Drain("cancelled", "you", asked_at))
    request = if_readable(read(Drain, begun(context).drain))
    assert (request is not None) is leaves
    assert request is None or (request.cause, request.by) == ("cancelled", "you")


def prepare(
    context: JobContext, attempt: Attempt, checks: Checks = NO_CHECKS, step: str = ""
) -> tuple[AttemptRunner, NodeAssignment | None]:
    """The assignment of an attempt whose checks have run.

    Args:
        step: see preparation_of.
    """
    preparation = preparation_of(context, attempt, checks, step)
    try:
        return preparation._runner, preparation.run()
    except NotEnoughNodes:
        return preparation._runner, None


def preparation_of(context: JobContext, attempt: Attempt, checks: Checks, step: str) -> Preparation:
    """
    Args:
        step: shell that stands for the srun of each step: its name is $2, its nodes are $3.
    """
    script = attempt.folder / "job.sbatch"
    script.write_text(step)
    job = SlurmJob(context, notice=60.0, backoff=30.0, outlives_nodes=False)
    steps = SlurmSteps(context, str(script), attempt, lock=os.open(os.devnull, os.O_RDONLY))
    runner = AttemptRunner(attempt, steps, job, Signals(()), silence_limit=0.0)
    return Preparation(context, checks, runner, steps, job)


def assigned(context: JobContext) -> NodeAssignment:
    attempt = begun(context)
    _, assignment = prepare(context, attempt)
    assert assignment is not None
    assert read(NodeAssignment, attempt.nodes) == assignment
    return assignment


def test_a_node_that_slurm_was_not_told_to_avoid_is_not_used(context: JobContext) -> None:
    end(context, BY_US, excluded=["n1", "n9"])
    assignment = assigned(context)
    assert assignment.steps == {"train": ["n2", "n3"]}
    assert assignment.bad == {"n1": "attempt 1 failed there"}


def test_nor_is_one_that_failed_an_earlier_attempt_of_the_allocation(context: JobContext) -> None:
    end(context, STAYS, excluded=["n1"], attempt=0)
    end(context, STAYS)
    assert set(assigned(context).bad) == {"n1"}


def test_one_that_the_run_cannot_do_without_is_used_though_slurm_refused_something_else(context: JobContext) -> None:
    end(context, BY_US, excluded=["n1", "n2"])
    write(context.run.attempt(1).requeued, Requeued(21.0, ["n2"], "postpone: no"))
    assert set(assigned(context).bad) == {"n2"}


def test_too_many_of_them_send_the_job_back(context: JobContext) -> None:
    end(context, BY_US, excluded=["n1", "n2"])
    runner, assignment = prepare(context, begun(context))
    assert assignment is None
    assert runner.request is not None and runner.request.cause == "bad nodes"


@pytest.mark.parametrize("by", ["an exclusion that Slurm took", "another job"])
def test_a_node_is_not_held_against_a_job_for_ever(context: JobContext, by: str) -> None:
    end(context, BY_US, excluded=["n1"], job_id="6" if by == "another job" else "7")
    if by != "another job":  # it is given the node by somebody who changed the job since
        write(context.run.attempt(1).requeued, Requeued(21.0))
    assert assigned(context).bad == {}


def test_a_node_that_does_not_answer_the_health_check_is_not_used(context: JobContext) -> None:
    attempt = begun(context)
    attempt.health("n1").parent.mkdir()
    for host in ("n1", "n3"):
        write(attempt.health(host), NodeHealth(host, time.time(), True, []))
    _, assignment = prepare(context, attempt, HEALTH, "exit 1")
    assert assignment is not None
    assert (assignment.steps, set(assignment.bad)) == ({"train": ["n1", "n3"]}, {"n2"})


@pytest.mark.parametrize(("hosts", "blamed"), [(["n1", "n2", "n3"], None), (["n1"], "n1")])
def test_a_health_check_that_cannot_start_is_a_failed_launch_and_says_why(
    context: JobContext, monkeypatch: pytest.MonkeyPatch, hosts: list[str], blamed: str | None
) -> None:
    monkeypatch.setattr(runner_module, "SIGNAL_S", 0.0)
    attempt = begun(context)
    log = "slurmstepd: error: execve(): python3: No such file or directory"
    words = "srun: error: n1: task 0: Exited with exit code 2"
    step = f'echo "{log}" >>{attempt.logs}/health.0.log; echo "{words}" >&2; exit 2'
    with pytest.raises(NotReady, match=r"no node has answered the health check: .*execve.*python3") as caught:
        prepare(context._replace(hosts=hosts), attempt, HEALTH, step)
    assert caught.value.host == blamed
    assert read(NodeAssignment, attempt.nodes) is ABSENT, "no node is bad"


@pytest.fixture
def unpack(tmp_path: Path) -> Checks:
    image = tmp_path / "image.sqsh"
    image.write_bytes(b"hsqs".ljust(96, b"\0"))
    return Checks({"": str(image)}, unpack=True)


REASON = "Write on output file failed because No space left on device"


def unpacking(attempt: Attempt, *well: str) -> str:
    """Simulate a step where only these nodes have room; srun names the tasks of the others."""
    files = "".join(f"touch {attempt.unpacked(host)}; " for host in well)
    bad = [(task, host) for task, host in enumerate(("n1", "n2", "n3")) if host not in well]
    said = "".join(
        f"echo '{REASON}' >{attempt.logs}/unpack.{task}.log; "
        f"echo 'srun: error: {host}: task {task}: Exited with exit code 1' >&2; "
        for task, host in bad
    )
    return f"{files}{said}exit {int(bool(bad))}"


def test_a_node_that_cannot_unpack_the_image_is_not_used(context: JobContext, unpack: Checks) -> None:
    attempt = begun(context)
    _, assignment = prepare(context, attempt, unpack, unpacking(attempt, "n1", "n3"))
    assert assignment is not None
    assert assignment.steps == {"train": ["n1", "n3"]}
    assert assignment.bad == {"n2": f"the image could not be unpacked: {REASON}"}


def test_a_node_that_cannot_unpack_the_image_of_the_replicas_is_not_used(context: JobContext, unpack: Checks) -> None:
    attempt = begun(context)
    done = {of: f"touch {attempt.unpacked('n1', of)} {attempt.unpacked('n3', of)}" for of in ("", OF_REPLICAS)}
    step = f"""case $2 in
        unpack) {done[""]} {attempt.unpacked("n2")} ;;
        unpack-infer) {done[OF_REPLICAS]}; echo "{REASON}" >{attempt.logs}/unpack-infer.1.log
            echo "srun: error: n2: task 1: Exited with exit code 1" >&2; exit 1 ;;
    esac"""
    image = unpack.images[""]
    _, assignment = prepare(context, attempt, unpack._replace(images={"": image, OF_REPLICAS: image}), step)
    assert assignment is not None
    assert assignment.bad == {"n2": f"the image could not be unpacked: {REASON}"}
    assert attempt.image.read_text() == attempt.replica_image.read_text() == f"{image}\n"


def test_without_a_spare_one_the_job_goes_elsewhere(context: JobContext, unpack: Checks) -> None:
    attempt = begun(context)
    runner, assignment = prepare(context, attempt, unpack, unpacking(attempt, "n1"))
    assert assignment is None and runner.request is not None and runner.request.cause == "bad nodes"


@pytest.mark.parametrize(("hosts", "blamed"), [(["n1", "n2", "n3"], None), (["n1"], "n1")])
def test_an_image_that_nobody_can_unpack_is_no_nodes_fault(
    context: JobContext, unpack: Checks, hosts: list[str], blamed: str | None
) -> None:
    write(context.run.plan, PlanRecord(1, 1, 0, [PlanRole("train", 0, 0, None, 1)]))
    attempt = begun(context)
    with pytest.raises(NotReady, match=f"^the image could not be unpacked: {REASON}$") as caught:
        prepare(context._replace(hosts=hosts), attempt, unpack, unpacking(attempt))
    assert caught.value.host == blamed


def forgetting(attempt: Attempt, then: str = "exit 0") -> str:
    """Simulate steps that unpack everywhere; their removals are listed in a file, and end with `then`."""
    unpacked = " ".join(str(attempt.unpacked(host)) for host in ("n1", "n2", "n3"))
    return f'case $2 in unpack) touch {unpacked} ;; forget) echo "$3" >>{attempt.folder}/forgotten; {then} ;; esac'


def forgotten(attempt: Attempt) -> list[str]:
    listed = attempt.folder / "forgotten"
    return listed.read_text().split() if listed.exists() else []


def test_containers_are_removed_from_the_nodes_that_live_if_there_is_time(
    context: JobContext, unpack: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "node_states", lambda hosts: {"n1": "allocated", "n2": "down*", "n3": "allocated"})
    attempt = begun(context)
    preparation = preparation_of(context, attempt, unpack, forgetting(attempt))
    preparation.run()
    (attempt.folder / "forgotten").unlink()  # those of earlier attempts
    now = time.time()
    for request in (None, Drain("preempted", "x", now), Drain("preempted", "x", now, deadline=now + 60.0)):
        preparation._runner.request = request
        preparation.forget_containers()
    preparation._runner.request = Drain("preempted", "x", now, deadline=now + 15.0)
    preparation.forget_containers()
    assert forgotten(attempt) == ["n1,n3"] * 3


@pytest.mark.parametrize("asked", ["before", "while unpacking"])
def test_containers_of_an_attempt_that_leaves_while_it_unpacks_are_removed(
    context: JobContext, unpack: Checks, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(queries, "node_states", lambda hosts: dict.fromkeys(hosts, "allocated"))
    attempt = begun(context)
    drain = attempt.folder / "request"
    write(drain, Drain("cancelled", "you", time.time()))
    ask = f"cp {drain} {attempt.drain}"
    step = f'{forgetting(attempt)}; [ "$2" != unpack ] || {ask}' if asked == "while unpacking" else ask
    preparation = preparation_of(context, attempt, unpack, step)
    with pytest.raises(AskedToLeave):
        preparation.run()
    before = forgotten(attempt)
    preparation.forget_containers()
    assert forgotten(attempt)[len(before) :] == (["n1,n2,n3"] if asked == "while unpacking" else [])


def test_containers_that_cannot_be_removed_are_told(
    context: JobContext, unpack: Checks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(queries, "node_states", lambda hosts: dict.fromkeys(hosts, "allocated"))
    attempt = begun(context)
    complaint = "sh: 1: enroot: not found"
    fails = f"echo '{complaint}' >{attempt.logs}/forget.0.log; "
    fails += "echo 'srun: error: n1: task 0: Exited with exit code 127' >&2; exit 127"
    preparation = preparation_of(context, attempt, unpack, forgetting(attempt, fails))
    preparation.run()
    preparation.forget_containers()
    assert f"may have stayed on the nodes, where they use disk space: {complaint}" in capfd.readouterr().out


def test_the_nodes_that_are_left_are_asked_for_until_slurm_answers(context: JobContext, monkeypatch) -> None:
    """Right after a node was lost the controller is busy; a dead node in the list would have steps wait for it."""
    answers = iter([SlurmSilent("timed out"), {"NodeList": "n[1-3]"}])

    def show(job_id: str) -> dict[str, str]:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    monkeypatch.setattr(queries, "show_job", show)
    monkeypatch.setattr(call, "ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(queries, "node_states", lambda hosts: {"n1": "allocated", "n2": "down*", "n3": "allocated"})
    left = without_dead_nodes(context)
    assert (left.hosts, left.given) == (["n1", "n3"], 3)
    assert (left.environ["SLURM_JOB_NUM_NODES"], left.environ["SLURM_JOB_NODELIST"]) == ("2", "n1,n3")


def test_nodes_that_slurm_says_nothing_about_are_not_taken_for_dead(context: JobContext, monkeypatch) -> None:
    monkeypatch.setattr(queries, "show_job", lambda job_id: {"NodeList": "n[1-3]"})
    monkeypatch.setattr(call, "ASK_AGAIN_S", 0.0)
    answers = iter(["", "n1 allocated\n", "n1 allocated\nn2 down*\nn3 allocated\n"])
    monkeypatch.setattr(queries, "call", lambda command: next(answers))
    assert without_dead_nodes(context).hosts == ["n1", "n3"]
    monkeypatch.setattr(queries, "call", lambda command: "")
    monkeypatch.setattr(slurm_run, "patiently", lambda ask_slurm: call.patiently(ask_slurm, 0.0))
    assert without_dead_nodes(context) == context._replace(given=3)


def test_a_run_is_taken_over_only_from_a_job_that_is_known_to_have_ended(
    context: JobContext, monkeypatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A job that Slurm says nothing about may still write into the run directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    write(context.run.resolved, PLAN)
    context = context._replace(slurm_cluster="west", environ={"SLURM_JOB_NAME": "mine"})
    nobody = SlurmRefused("slurm_load_jobs error: Invalid job id specified")
    silent = SlurmRefused("scontrol: no such command here")
    a, b = "a" * 32, "b" * 32
    west = Owner("6", "lab", 0.0, slurm_cluster="west", run_id=a, name="mine")
    nowhere = west._replace(slurm_cluster=None)
    running = {"JobState": "RUNNING", "JobName": "mine"}
    stays: list[tuple[Owner, SlurmRefused | dict[str, str]]] = [
        (west, silent),
        (west, running),
        (west, {**running, "Comment": f"theirs mrl:{a}"}),
        (west._replace(slurm_cluster="east"), nobody),
        (nowhere, nobody),  # another cluster's, for all we know (R10)
        (nowhere, {"JobState": "COMPLETED", "Comment": f"mrl:{b}"}),
    ]
    goes: list[tuple[Owner, SlurmRefused | dict[str, str]]] = [
        (west, nobody),
        (west, {"JobState": "COMPLETED", "JobName": "mine"}),
        (west, {**running, "Comment": f"mrl:{b}"}),  # its id was used again
        (nowhere, {"JobState": "COMPLETED", "Comment": f"mrl:{a}"}),
    ]
    for owner, answer in stays + goes:

        def show(job_id: str, answer: SlurmRefused | dict[str, str] = answer) -> dict[str, str]:
            if isinstance(answer, SlurmRefused):
                raise answer
            return answer

        monkeypatch.setattr(queries, "show_job", show)
        write(context.run.job, owner)
        if (owner, answer) in stays:
            with pytest.raises(JobRefused, match="belongs to job 6, which may still run"):
                own.own(context)
        else:
            own.own(context).release()
            ours = read(Owner, context.run.job)
            assert (ours.job_id, ours.name, ours.run_id) == ("7", "mine", read(RunIdentity, context.run.identity).id)


@pytest.mark.parametrize("named", ["owner", "ledger"])
def test_a_job_waits_until_the_one_before_is_gone_from_its_nodes(context, monkeypatch, capsys, named: str) -> None:
    """A rank that does not die may still write into the run directory."""
    states = ["COMPLETING", "COMPLETING", "CANCELLED"]
    asked = []

    def show(job_id: str) -> dict[str, str]:
        asked.append(job_id)
        return {"JobState": states.pop(0)}

    monkeypatch.setattr(queries, "show_job", show)
    monkeypatch.setattr(own, "LOOK_S", 0.0)
    if named == "owner":
        context.run.attempts_ledger.unlink()
    owner = Owner("7" if named == "owner" else "8", "lab", 0.0)
    own._wait_for_earlier_jobs(context._replace(job_id="8"), owner)
    assert asked == ["7"] * 3
    assert capsys.readouterr().out == "waiting until job 7 has left its nodes\n"


def test_that_wait_has_an_end(context: JobContext, monkeypatch) -> None:
    monkeypatch.setattr(queries, "show_job", lambda job_id: {"JobState": "COMPLETING"})
    monkeypatch.setattr(own, "LOOK_S", 0.01)
    monkeypatch.setattr(own, "COMPLETING_S", 0.05)
    own._wait_for_earlier_jobs(context, Owner("6", "lab", 0.0))


def test_what_a_user_sets_for_sinfo_does_not_hide_nodes(monkeypatch) -> None:
    monkeypatch.setenv("SINFO_PARTITION", "other")
    assert "SINFO_PARTITION" not in call.asking_environment()
