"""Any operation on files, or any command of Slurm, may fail under mrl-submit, mrl resume, status, ls, cancel and
requeue. Each of these does what it says or ends with one clear error. It leaves nothing half-done, deletes nothing
good, and shows the real state or says what could not be read (simulated_login.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_injection import OLDER, ONCE, Fault, Tally, faults
from simulated_job import GARBAGE, SLURM_KINDS
from simulated_login import LoginNode, Ran, Site

from megatron_rl.contract.attempt_records import Drain
from megatron_rl.contract.codes import CANCELLED, REQUEUE
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import if_readable, read
from megatron_rl.contract.run_records import Owner

LONG_S, VERY_LONG_S = 60.0, 600.0
Look = Callable[[LoginNode, Ran, "Before"], list[str]]


@dataclass(frozen=True)
class Before:
    """State before a command."""

    tree: dict[str, str]
    jobs: list[str]
    undisturbed: Ran | None
    """The same command without faults; None if this command has none."""
    fault: Fault | None


@dataclass(frozen=True)
class Case:
    words: tuple[str, ...]
    state: str
    look: Look
    codes: tuple[int, ...]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        yield Site(tmp_path_factory.mktemp("login"), patch)


# Required states after a command


def after_submission(node: LoginNode, ran: Ran, before: Before) -> list[str]:
    """Check a new or resumed run: there is a job with all that it needs, or nothing has changed."""
    jobs = [job for job in node.jobs.values() if job.id not in before.jobs]
    wrong = ["two jobs"] if len(jobs) > 1 else []
    for job in jobs:
        run = RunDir(job.script.parent)
        needed = (run.resolved, run.recipe, run.plan, run.script, run.identity, run.code_record)
        wrong += [f"job {job.id} has no {path.name}" for path in needed if not path.is_file()]
        owner = if_readable(read(Owner, run.job))
        if ran.code == 0 and (owner is None or owner.job_id != job.id):
            wrong.append(f"job {job.id} does not own its run")
    if bool(jobs) != (ran.code == 0) and ran.code != 1:
        wrong.append(f"{len(jobs)} jobs, and it ended with {ran.code}")
    once = before.fault is None or before.fault.seconds == ONCE
    if ran.code == 2:
        wrong += [f"looks submitted: {path}" for path in looks_submitted(node, before)]
        wrong += [f"changed: {path}" for path in changed(before.tree, node.tree())] if once else []
    return wrong + lost(node, before)


def looks_submitted(node: LoginNode, before: Before) -> list[Path]:
    return [path for path in node.runs.glob("*/job.json") if str(path.relative_to(node.root)) not in before.tree]


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))


def lost(node: LoginNode, before: Before) -> list[str]:
    """Check that the results of a run, and another run, are unchanged, and that requests to it still exist."""
    made = tuple(f"runs/a/{name}" for name in ("attempts", "checkpoints", "metrics", "logs/"))
    now = node.tree()
    kept = [path for path in before.tree if path.startswith((*made, "runs/b/"))]
    wrong = [path for path in kept if now.get(path) != before.tree[path]]
    return [f"lost: {path}" for path in {*wrong, *(path for path in before.tree if path not in now)}]


def after_start(node: LoginNode, ran: Ran, before: Before) -> list[str]:
    """Check a run on this machine: it was started with all that it needs, or nothing has changed."""
    wrong = []
    for run in node.supervised:
        needed = (run.resolved, run.recipe, run.identity, run.attempt(1).folder, run.attempt(1).logs)
        wrong += [f"it has no {path.name}" for path in needed if not path.exists()]
    if len(node.supervised) != (0 if ran.code == 2 else 1):
        wrong.append(f"started {node.supervised}, and it ended with {ran.code}")
    if ran.code == 2 and (before.fault is None or before.fault.seconds == ONCE):
        wrong += [f"changed: {path}" for path in changed(before.tree, node.tree())]
    return wrong + lost(node, before)


def after_look(node: LoginNode, ran: Ran, before: Before) -> list[str]:
    wrong = [] if node.tree() == before.tree else ["it has changed something"]
    whole = before.undisturbed is None or ran.out == before.undisturbed.out
    spoilt = before.fault is not None and before.fault.kind == GARBAGE  # a log may hold anything
    return wrong if whole or spoilt or ran.code else [*wrong, f"it shows {ran.out!r}"]


def after_status(node: LoginNode, ran: Ran, before: Before) -> list[str]:
    wrong = [] if node.tree() == before.tree else ["it has changed something"]
    if ran.code == 2 or before.undisturbed is None:
        return wrong
    told, whole = json.loads(ran.out), json.loads(before.undisturbed.out)
    said = told["unread"] or told["state"] in ("unreadable", "unknown")
    compared = ("run", "state", "step", "steps", "mean_reward", "phase", "attempt", "cluster")
    differing = [key for key in compared if told[key] != whole[key]]
    differing += ["goodput"] if (told["goodput"] is None) != (whole["goodput"] is None) else []
    differing += ["job"] if sorted(told["job"] or {}) != sorted(whole["job"]) else []
    if differing and not said and before.fault and before.fault.kind != OLDER:
        wrong.append(f"not said why these are other ones: {differing}")
    if (said and ran.code == 0) or (ran.code == 3 and not said):
        wrong.append(f"it ended with {ran.code} and said {said!r}")
    return wrong


def after_ls(node: LoginNode, ran: Ran, before: Before) -> list[str]:
    wrong = [] if node.tree() == before.tree else ["it has changed something"]
    if ran.code == 2 or before.undisturbed is None or (before.fault and before.fault.kind == OLDER):
        return wrong
    told, whole = ({row["run"]: row for row in json.loads(one.out)["runs"]} for one in (ran, before.undisturbed))
    for name, row in whole.items():
        if name not in told:
            wrong += [] if ran.err else [f"{name} is not listed"]
            continue
        unread = [key for key in row if told[name][key] != row[key]]
        if unread and told[name]["state"] not in ("unreadable", "unknown") and not ran.err:
            wrong.append(f"{name}: not said why these are other ones: {unread}")
    return wrong


def after_order(asked: str | None, orders: list[str], cause: str | None) -> Look:
    """Check a command that ends a job: it does what it says, or nothing harmful.

    Args:
        asked: signal that the steps get.
        orders: commands that Slurm gets for the job.
        cause: cause of the request to leave.
    """

    def look(node: LoginNode, ran: Ran, before: Before) -> list[str]:
        job, another = node.jobs["102"], node.jobs["101"]
        wrong = ["another run's job was told something"] if another.signals or another.orders else []
        drain = if_readable(read(Drain, node.run("a").attempt(1).drain))
        if ran.code == 0:
            wrong += [] if (drain.cause if drain else None) == cause else [f"asked to leave: {drain}"]
            late = job.orders != orders and before.fault is None
            wrong += [f"told {job.orders}"] if late else []
        if job.orders not in ([], orders):
            wrong.append(f"told {job.orders}")
        if drain is not None and drain.cause != cause:
            wrong.append(f"asked to leave: {drain}")
        if drain is None and asked and job.signals:
            wrong.append("its steps were signalled, and nothing tells them why")
        other = changed(before.tree, node.tree())
        known = (
            "runs/a/attempts/001/drain.json",
            "runs/a/attempts/001/.drain.json.",
        )  # a partial write, in a long outage
        return wrong + [f"changed: {path}" for path in other if not path.startswith(known)]

    return look


CASES = {
    "submit": Case(("mrl-submit", "demo", "--cluster", "lab"), "none", after_submission, (0, 1, 2)),
    "resume": Case(("resume", "a", "training.steps=900", "--update-code"), "ended", after_submission, (0, 1, 2)),
    "submit here": Case(("mrl-submit", "demo", "--cluster", "local", "--detach"), "none", after_start, (0, 1, 2)),
    "fork": Case(("fork", "a", "training.steps=900"), "ended", after_submission, (0, 1, 2)),
    "logs": Case(("logs", "a", "--json"), "running", after_look, (0, 1, 2)),
    "status": Case(("status", "a", "--json"), "running", after_status, (0, 2, 3)),
    "ls": Case(("ls", "--json"), "running", after_ls, (0, 2)),
    "cancel --drain": Case(("cancel", "a", "--drain"), "running", after_order("USR1", [], CANCELLED), (0, 1, 2)),
    "cancel": Case(("cancel", "a"), "running", after_order(None, ["scancel"], CANCELLED), (0, 1, 2)),
    "requeue": Case(("requeue", "a"), "running", after_order("USR1", [], REQUEUE), (0, 1, 2)),
    "requeue --now": Case(("requeue", "a", "--now"), "running", after_order(None, ["requeue"], None), (0, 1, 2)),
}
each_case = pytest.mark.parametrize("name", CASES)
CASES_OF_SLURM = [name for name in CASES if name not in ("submit here", "logs")]


def driven(case: Case, node: LoginNode, undisturbed: Ran | None, fault: Fault | None) -> tuple[Ran, list[str]]:
    """Run the command. Returns its result, and what is wrong after it."""
    before = Before(node.tree(), list(node.jobs), undisturbed, fault)
    ran = node.mrl(*case.words)
    with node.files.aside():
        wrong = case.look(node, ran, before)
    if ran.error is not None:
        wrong.append(f"a fault that nobody thought of: {ran.error!r}")
    if ran.code not in case.codes:
        wrong.append(f"exit code {ran.code}")
    if ran.code in (1, 2) and f"\n{ran.err}".count("\nerror: ") != 1:
        wrong.append(f"not one error: {ran.err!r}")
    return ran, wrong


def undisturbed(site: Site, case: Case) -> tuple[LoginNode, Ran]:
    node = site.node(case.state)
    ran, wrong = driven(case, node, None, None)
    assert (wrong, ran.code) == ([], 0), (wrong, ran)
    return node, ran


def sweep(site: Site, case: Case, chosen: list[Fault], names: Callable[[int], str], of_slurm: bool = False) -> Tally:
    """Make operations of a command fail in turn.

    Args:
        names: returns the kind of an operation from its number.
        of_slurm: the operations are commands of Slurm, not operations on files.
    """
    _, whole = undisturbed(site, case)
    tally, problems = Tally(), []
    for fault in chosen:
        node = site.node(case.state, **{"slurm_fault" if of_slurm else "fault": fault})
        jobs = len(node.jobs)
        ran, wrong = driven(case, node, whole, fault)
        node.files.fail(None)
        node.slurm_fault = None
        if case.look is after_submission and ran.code == 2:  # the fault was repaired
            again = node.mrl(*case.words)
            wrong += [] if (again.code, len(node.jobs)) == (0, jobs + 1) else [f"afterwards: {again}"]
        problems += [f"{fault} ({names(fault.at)}): {one}" for one in wrong]
        tally.count(fault, names(fault.at))
    assert not problems, "\n".join(problems[:40])
    return tally


# Files


def sweep_files(site: Site, name: str, each: int | None, seconds: float) -> Tally:
    node, _ = undisturbed(site, CASES[name])
    seen = node.files.operations
    tally = sweep(site, CASES[name], faults(seen, each, seconds), lambda at: seen[at].kind)
    assert tally.operations >= {"open", "read", "stat"}
    return tally


LONG = ("fork", "resume", "submit")
"""Commands that copy a run or the code, and take longest. `make test` has two of them with faults of Slurm."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in LONG])
def test_command_survives_the_failure_of_an_operation_on_its_files(site, record_property, name):
    sweep_files(site, name, 1, ONCE).report(f"mrl {name}, once", record_property)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [ONCE, LONG_S])
@each_case
def test_command_survives_every_fault_of_every_operation(site, record_property, name, seconds):
    sweep_files(site, name, None, seconds).report(f"mrl {name}, for {seconds:.0f} s", record_property)


# Slurm's commands


def sweep_slurm(site: Site, name: str, lengths: tuple[float, ...]) -> Tally:
    node, _ = undisturbed(site, CASES[name])
    kinds = [(at, kind) for at in range(len(node.commands)) for kind in SLURM_KINDS]
    chosen = [Fault(kind, at, length) for at, kind in kinds for length in lengths]
    return sweep(site, CASES[name], chosen, lambda at: node.commands[at].split()[0], of_slurm=True)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("fork", "resume") else ())  # they submit as `submit` does
        for name in CASES_OF_SLURM
    ],
)
def test_command_survives_a_useless_answer_of_slurm(site, record_property, name):
    sweep_slurm(site, name, (ONCE,)).report(f"mrl {name}, once", record_property)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES_OF_SLURM)
def test_command_survives_an_outage_of_slurm_of_ten_minutes(site, record_property, name):
    sweep_slurm(site, name, (VERY_LONG_S,)).report(f"mrl {name}, for {VERY_LONG_S:.0f} s", record_property)
