"""Whatever fails on the host side, once or for a while, the run goes on or is held with a reason: it is never lost,
never started over, never run by two, and nothing good of it is deleted. Each operation on its files, and each command
of Slurm, fails in turn in a run of three attempts (simulated_job.py)."""

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
"""Outages: one that retries outlast, one that sends the job elsewhere, one that only the wait for Slurm outlasts."""

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
    """What is wrong with a run that was driven to its end."""
    return _problems(cluster, lambda: [f"nobody goes on with it: {cluster.said[-1]}"])


def problems_of_held(cluster: Cluster) -> list[str]:
    """The same of one that may be held, and then is resumed by somebody who has had a look."""

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
    """Try each fault; the operations that failed.

    Args:
        names: kind of an operation, by its number.
        look: drives a run, and tells what is wrong with it.
    """
    tally, problems = Tally(), []
    for fault in chosen:
        for problem in look(make(fault)):
            problems.append(f"{fault} ({names(fault.at)}): {problem}")
        tally.count(fault, names(fault.at))
    assert not problems, "\n".join(problems[:20])
    return tally


# Files


def sweep_files(make_cluster: MakeCluster, each: int | None, seconds: float, **facts: Any) -> Tally:
    whole = make_cluster(**facts)
    assert problems_of(whole) == []
    seen = whole.files.operations
    assert len(seen) > 400
    chosen = faults(seen, each, seconds)
    return sweep(lambda fault: make_cluster(fault=fault, **facts), chosen, lambda at: seen[at].kind)


CHANGES = {"create", "write", "close", "fsync", "mkdir", "rename", "link"}


@REQUEUEABLE
def test_a_run_outlasts_the_failure_of_an_operation_on_its_files(make_cluster, record_property, requeueable):
    tally = sweep_files(make_cluster, 1, ONCE, requeueable=requeueable)
    tally.report("once", record_property)
    assert tally.operations >= {"open", "read", "stat", "list", "lock"} | CHANGES


def test_a_run_outlasts_a_file_system_that_is_away_for_a_minute(make_cluster, record_property):
    sweep_files(make_cluster, 1, LONG_S).report(f"for {LONG_S:.0f} s", record_property)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [ONCE, SHORT_S, LONG_S])
def test_a_run_outlasts_every_fault_of_every_operation(make_cluster, record_property, seconds):
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
def test_a_run_outlasts_a_command_of_slurm_that_gives_no_answer_of_use(make_cluster, record_property, requeueable):
    def once(commands: int) -> list[Fault]:
        return [Fault(ANSWERED_LATE[at % len(ANSWERED_LATE)], at) for at in range(commands)]

    tally = sweep_slurm(make_cluster, once, problems_of, requeueable=requeueable)
    tally.report("once", record_property)


@REQUEUEABLE
def test_a_run_outlasts_a_slurm_that_is_away_for_ten_minutes(make_cluster, record_property, requeueable):
    def at_each(commands: int) -> list[Fault]:
        return [Fault(ANSWERED_LATE[at % len(ANSWERED_LATE)], at, VERY_LONG_S) for at in range(commands)]

    tally = sweep_slurm(make_cluster, at_each, problems_of, requeueable=requeueable)
    tally.report(f"for {VERY_LONG_S:.0f} s", record_property)


@REQUEUEABLE
def test_a_run_that_slurm_refuses_something_goes_on_or_says_why_not(make_cluster, record_property, requeueable):
    def refusals(commands: int) -> list[Fault]:
        return [Fault("refusal", at) for at in range(commands)]

    tally = sweep_slurm(make_cluster, refusals, problems_of_held, requeueable=requeueable)
    tally.report("refused", record_property)


@pytest.mark.slow
@REQUEUEABLE
def test_a_run_outlasts_every_fault_of_every_command(make_cluster, record_property, requeueable):
    def every(commands: int) -> list[Fault]:
        lengths = (ONCE, LONG_S, VERY_LONG_S)
        return [Fault(kind, at, length) for at in range(commands) for kind in ANSWERED_LATE for length in lengths]

    sweep_slurm(make_cluster, every, problems_of, requeueable=requeueable).report("all", record_property)


# Preemption


def test_a_run_outlasts_any_number_of_preemptions_and_its_job_starts_once_for_each(make_cluster):
    cluster = make_cluster(preemptions=8)
    assert problems_of(cluster) == []
    assert cluster.jobs["7"].batch_flag == 1, "Slurm counts the requeues that it does by itself, and holds the job"
    ends = ends_in(read_ledger(cluster.run))
    assert [end.cause for end in ends] == ["preempted"] * 8 + [None] * 2
    assert len(cluster.codes) == len(ends), "it does not start once more when it has finished"


@pytest.mark.parametrize("flag", [2, 5])
def test_a_job_that_slurm_has_requeued_by_itself_can_still_be_requeued(make_cluster, flag):
    cluster = make_cluster()
    cluster.submit("7").batch_flag = flag
    assert cluster.drive()
    assert [end.then for end in ends_in(read_ledger(cluster.run))] == ["requeue", "requeue", "over"]


# Two jobs


def second_job(cluster: Cluster) -> list[str]:
    """Another job of the run starts while the first one trains."""

    def start_another() -> None:
        cluster.during = lambda: None
        begins = len(cluster.files.operations)
        job = cluster.submit("9")
        cluster.start(job)
        cluster.second = range(begins, len(cluster.files.operations))
        job.state = "COMPLETED"  # somebody cancels it

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


# Faults of our own


def test_a_fault_of_ours_in_an_attempt_is_a_crash_that_is_not_repeated_for_ever(make_cluster):
    cluster = make_cluster()
    cluster.patch.setattr(Preparation, "run", lambda self: {}["of ours"])
    cluster.submit("7")
    assert not cluster.drive()
    ends = ends_in(read_ledger(cluster.run))
    assert {(end.outcome, end.error) for end in ends} == {("crashed", "KeyError: 'of ours'")}
    assert [end.then for end in ends] == ["requeue", "requeue", "held"]
    assert "Traceback" in cluster.said[0]
