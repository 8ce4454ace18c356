"""After any fault on the host side, brief or long, the run continues or is held with a reason. It is never lost,
started over or run by two jobs, and nothing good of it is deleted. Each operation on its files, and each command of
Slurm, fails in turn in a run of three attempts (simulated_job.py)."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fault_injection import ONCE, Fault, Tally, faults
from simulated_job import SLURM_KINDS, STEPS, Cluster

from launcher.host.attempt.prepare import Preparation
from launcher.host.record.ledger import ends_in, read_ledger, starts_in
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.records import Lines, read_lines

SHORT_S, LONG_S, VERY_LONG_S = 10.0, 60.0, 600.0
"""Seconds of outages: retries outlast the first, the second moves the job, the wait for Slurm outlasts the third."""

MakeCluster = Callable[..., Cluster]
REQUEUEABLE = pytest.mark.parametrize(
    "requeueable",
    [pytest.param(True, id="requeued"), pytest.param(False, id="succeeded by another job", marks=pytest.mark.slow)],
)


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    numbers = itertools.count()
    with pytest.MonkeyPatch.context() as patch:

        def make(**facts: Any) -> Cluster:
            patch.undo()
            shutil.rmtree(tmp_path / "runs", ignore_errors=True)
            return Cluster(tmp_path / "runs" / str(next(numbers)), patch, **facts)

        yield make


def problems_of(cluster: Cluster) -> list[str]:
    """Drive a run to its end. Returns what is wrong with it."""
    return _problems(cluster, lambda: [f"nobody goes on with it: {cluster.said[-1]}"])


def problems_of_held(cluster: Cluster) -> list[str]:
    """Drive a run that may be held, in which case a user resumes it. Returns what is wrong with it."""

    def resume() -> list[str]:
        held = "could not be sent back as intended" in cluster.said[-1]
        wrong = [] if held else [f"it is over without a reason: {cluster.said[-1]}"]
        cluster.slurm_fault = None
        cluster.submit("20")
        return wrong if cluster.drive() else [*wrong, f"it does not go on when it is resumed: {cluster.said[-1]}"]

    return _problems(cluster, resume)


def _problems(cluster: Cluster, where_it_stopped: Callable[[], list[str]]) -> list[str]:
    cluster.submit("7")
    wrong = [] if cluster.drive() else where_it_stopped()
    with cluster.files.aside():
        return wrong + cluster.violations + wrong_in_record(cluster)


def wrong_in_record(cluster: Cluster) -> list[str]:
    problems = []
    metrics = read_lines(MetricsLine, cluster.run.metrics)
    assert isinstance(metrics, Lines)
    if [line.step for line in metrics.records] != list(range(1, STEPS + 1)):
        problems.append(f"steps on record: {[line.step for line in metrics.records]}")
    ledger = read_ledger(cluster.run)
    started, ended = [line.attempt for line in starts_in(ledger)], [line.attempt for line in ends_in(ledger)]
    if sorted(set(started)) != started:
        problems.append(f"attempts that started: {started}")
    if ended != started:
        problems.append(f"attempts {started} ended as {ended}")
    return problems


def sweep(
    make: Callable[[Fault], Cluster],
    chosen: Sequence[Fault],
    names: Callable[[int], str],
    look: Callable[[Cluster], list[str]] = problems_of,
) -> Tally:
    """Try each fault. Returns the operations that failed.

    Args:
        names: returns the kind of an operation from its number.
        look: drives a run, and returns what is wrong with it.
    """
    tally, problems = Tally(), []
    for fault in chosen:
        for problem in look(make(fault)):
            problems.append(f"{fault} ({names(fault.at)}): {problem}")
        tally.count(fault, names(fault.at))
    assert not problems, "\n".join(problems[:20])
    return tally


# Files


def sweep_files(make_cluster: MakeCluster, each: int | None, seconds: float, stride: int = 1, **facts: Any) -> Tally:
    """each, seconds, stride: as for `faults`."""
    whole = make_cluster(**facts)
    assert problems_of(whole) == []
    seen = whole.files.operations
    assert len(seen) > 400
    chosen = faults(seen, each, seconds, stride=stride)
    return sweep(lambda fault: make_cluster(fault=fault, **facts), chosen, lambda at: seen[at].kind)


CHANGES = {"create", "write", "close", "fsync", "mkdir", "rename", "link"}


@REQUEUEABLE
def test_run_outlasts_the_failure_of_an_operation_on_its_files(make_cluster, record_property, requeueable):
    tally = sweep_files(make_cluster, 1, ONCE, stride=2, requeueable=requeueable)
    tally.report("once", record_property)
    assert tally.operations >= {"open", "read", "stat", "list", "lock"} | CHANGES


def test_run_outlasts_an_outage_of_its_file_system_of_a_minute(make_cluster, record_property):
    sweep_files(make_cluster, 1, LONG_S, stride=5).report(f"for {LONG_S:.0f} s", record_property)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [ONCE, SHORT_S, LONG_S])
def test_run_outlasts_every_fault_of_every_operation(make_cluster, record_property, seconds):
    sweep_files(make_cluster, None, seconds).report(f"for {seconds:.0f} s", record_property)


# Slurm's commands


def sweep_slurm(make_cluster: MakeCluster, chosen: Callable[[int], Sequence[Fault]], look: Any, **facts: Any) -> Tally:
    whole = make_cluster(**facts)
    assert problems_of(whole) == []
    commands = [" ".join(command.split()[:2]).partition("=")[0] for command in whole.commands]
    assert {command.split()[0] for command in commands} >= {"scontrol", "scancel", "sinfo"}
    return sweep(
        lambda fault: make_cluster(slurm_fault=fault, **facts), chosen(len(commands)), commands.__getitem__, look
    )


ANSWERED_LATE = [kind for kind in SLURM_KINDS if kind != "refusal"]


@REQUEUEABLE
def test_run_outlasts_a_useless_answer_of_a_slurm_command(make_cluster, record_property, requeueable):
    def once(commands: int) -> list[Fault]:
        return [Fault(ANSWERED_LATE[at % len(ANSWERED_LATE)], at) for at in range(commands)]

    tally = sweep_slurm(make_cluster, once, problems_of, requeueable=requeueable)
    tally.report("once", record_property)


@REQUEUEABLE
def test_run_outlasts_an_outage_of_slurm_of_ten_minutes(make_cluster, record_property, requeueable):
    def at_each(commands: int) -> list[Fault]:
        return [Fault(ANSWERED_LATE[at % len(ANSWERED_LATE)], at, VERY_LONG_S) for at in range(commands)]

    tally = sweep_slurm(make_cluster, at_each, problems_of, requeueable=requeueable)
    tally.report(f"for {VERY_LONG_S:.0f} s", record_property)


@REQUEUEABLE
def test_run_continues_or_says_why_not_after_a_refusal_of_slurm(make_cluster, record_property, requeueable):
    def refusals(commands: int) -> list[Fault]:
        return [Fault("refusal", at) for at in range(commands)]

    tally = sweep_slurm(make_cluster, refusals, problems_of_held, requeueable=requeueable)
    tally.report("refused", record_property)


@pytest.mark.slow
@REQUEUEABLE
def test_run_outlasts_every_fault_of_every_command(make_cluster, record_property, requeueable):
    def every(commands: int) -> list[Fault]:
        lengths = (ONCE, LONG_S, VERY_LONG_S)
        return [Fault(kind, at, length) for at in range(commands) for kind in ANSWERED_LATE for length in lengths]

    sweep_slurm(make_cluster, every, problems_of, requeueable=requeueable).report("all", record_property)


# Preemption


def test_run_outlasts_any_number_of_preemptions_and_its_job_starts_once_for_each(make_cluster):
    cluster = make_cluster(preemptions=8)
    assert problems_of(cluster) == []
    assert cluster.jobs["7"].batch_flag == 1, "Slurm counts its own requeues, and would hold the job"
    ends = ends_in(read_ledger(cluster.run))
    assert [end.cause for end in ends] == ["preempted"] * 8 + [None] * 2
    assert len(cluster.codes) == len(ends), "the job must not start again after it has finished"


@pytest.mark.parametrize("flag", [2, 5])
def test_job_that_slurm_itself_requeued_can_still_be_requeued(make_cluster, flag):
    cluster = make_cluster()
    cluster.submit("7").batch_flag = flag
    assert cluster.drive()
    assert [end.then for end in ends_in(read_ledger(cluster.run))] == ["requeue", "requeue", "over"]


# Two jobs


def second_job(cluster: Cluster) -> list[str]:
    """Start another job of the run while the first one trains. Returns what is wrong."""

    def start_another() -> None:
        cluster.during = lambda: None
        begins = len(cluster.files.operations)
        job = cluster.submit("9")
        cluster.start(job)
        cluster.second = range(begins, len(cluster.files.operations))
        job.state = "COMPLETED"  # a user cancels it

    cluster.during = start_another
    return problems_of(cluster)


def test_no_fault_makes_two_jobs_owners_of_one_run(make_cluster, record_property):
    whole = make_cluster()
    assert second_job(whole) == []
    seen = whole.files.operations
    assert any("belongs to job 7" in said for said in whole.said)
    chosen = [fault for fault in faults(seen) if fault.at in whole.second]
    tally = sweep(lambda fault: make_cluster(fault=fault), chosen, lambda at: seen[at].kind, second_job)
    tally.report("of a second job", record_property)
    assert tally.operations >= {"open", "read", "stat", "lock"}


# Bugs of the host side itself


def test_bug_in_an_attempt_is_a_crash_and_not_repeated_for_ever(make_cluster):
    cluster = make_cluster()
    cluster.patch.setattr(Preparation, "run", lambda self: {}["of ours"])
    cluster.submit("7")
    assert not cluster.drive()
    ends = ends_in(read_ledger(cluster.run))
    assert {(end.outcome, end.error) for end in ends} == {("crashed", "KeyError: 'of ours'")}
    assert [end.then for end in ends] == ["requeue", "requeue", "held"]
    assert "Traceback" in cluster.said[0]
