"""Runs from Python on a simulated Slurm: a run's job as one of submitit, errors, and no output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import submitit
from run_helpers import end, make_run
from simulated_login import FAILED, PENDING, RUNNING, LoginNode, Site
from submitit.core.utils import FailedJobError, UncompletedJobError

from launcher.api import BadInput, Run, find, submit
from megatron_rl.contract.attempt_records import AttemptStart, Drain, MetricsLine
from megatron_rl.contract.codes import CANCELLED
from megatron_rl.contract.records import append, read, write
from megatron_rl.contract.run_records import Done


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        yield Site(tmp_path_factory.mktemp("login"), patch)


@pytest.fixture
def node(site: Site) -> LoginNode:
    """Run `a` trains in job 102; `b` has finished in job 101."""
    return site.node("running")


def test_a_running_job_is_submitits_and_asks_slurm(node: LoginNode, capfd: pytest.CaptureFixture[str]) -> None:
    run = find("a")
    job = run.job
    assert isinstance(job, submitit.SlurmJob)
    assert (job.job_id, job.state, job.done(), job.num_tasks) == ("102", RUNNING, False, 1)
    assert (job.stdout(), job.stderr()) == (None, None), "the script has printed nothing yet"
    run.files.batch_log.write_text("attempt 1\n")
    assert job.stdout() == "attempt 1\n"
    assert [row["step"] for row in run.metrics()] == [1, 2]
    assert run.log() == ["rank 0 trains"]
    assert capfd.readouterr() == ("", "")


def test_a_requeued_job_is_not_done_and_keeps_its_id(node: LoginNode) -> None:
    job = find("a").job
    assert job.state == RUNNING
    node.jobs["102"].state = PENDING
    node.clock.sleep(1.0)
    assert (job.job_id, job.done(force_check=True), job.get_info()["State"]) == ("102", False, PENDING)


def test_the_job_of_a_run_that_is_resumed_is_the_new_one(node: LoginNode) -> None:
    run = find("a")
    job = run.job
    end(run.files, 1, "crashed", node.clock.now, job_id="102")
    node.jobs["102"].state = FAILED
    assert job.done(force_check=True)
    resumed = run.resume()
    assert resumed == run and job.job_id == "103"
    assert (job.done(force_check=True), job.state) == (False, PENDING)


def test_a_job_cancels_the_run_which_does_not_come_back(node: LoginNode) -> None:
    run = find("a")
    run.job.cancel()
    assert node.jobs["102"].orders == ["scancel"] and read(Drain, run.files.attempt(1).drain).cause == CANCELLED
    assert find("b").job.cancel() is None and node.jobs["101"].orders == [], "it has ended"


def test_a_run_saves_before_it_is_cancelled(node: LoginNode) -> None:
    assert "was asked to save" in find("a").cancel()
    assert (node.jobs["102"].orders, node.jobs["102"].signals) == ([], ["USR1"])
    assert find("b").cancel() == "already ended: finished"


def test_results_are_those_of_the_last_step_or_the_failure(node: LoginNode) -> None:
    finished, failed = find("b"), find("a")
    append(finished.files.metrics, MetricsLine(800, {"loss": 1.0, "mean_reward": 0.5}))
    assert finished.job.result() == finished.metrics()[-1] == {"step": 800, "loss": 1.0, "mean_reward": 0.5}
    end(failed.files, 1, "crashed", node.clock.now, job_id="102", rank=0, error="ValueError: no")
    node.jobs["102"].state = FAILED
    assert isinstance(failed.job.exception(), FailedJobError)
    with pytest.raises(FailedJobError, match="ValueError: no"):
        failed.job.results()


def test_a_cancelled_job_is_uncompleted(node: LoginNode) -> None:
    node.jobs["102"].state = "CANCELLED"
    assert find("a").wait(timeout_s=10) == "cancelled"
    error = find("a").job.exception()
    assert isinstance(error, UncompletedJobError) and not isinstance(error, FailedJobError)
    assert str(error).endswith("a is cancelled: job 102 was cancelled")


def test_a_wait_has_a_limit(node: LoginNode) -> None:
    with pytest.raises(TimeoutError, match="a is running after 30 s"):
        find("a").wait(timeout_s=30)


def test_a_submission_returns_its_run_with_what_the_command_would_print(
    node: LoginNode, capfd: pytest.CaptureFixture[str]
) -> None:
    first = submit("demo", "grpo.kl_beta=0.1", "grpo.kl_estimator=k1", cluster="lab")
    after = submit("demo", cluster="lab", run_dir=node.runs / "after", after=(first.name,))
    assert (first.job.job_id, after.job.job_id) == ("103", "104")
    assert any("grpo.kl_estimator is k1" in note for note in first.notes)
    assert (after.path, after.state, after.metrics()) == (node.runs / "after", "queued", [])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("overrides", "options", "why"),
    [
        (("training.seed=1,2",), {}, "a sweep of 2 runs: submit each in a loop"),
        (("grpo.group_sizes=3",), {}, r"group_sizes: unknown key \(did you mean group_size\?\)"),
        ((), {"cluster": "labb"}, "labb"),
        ((), {"run_dir": ""}, "the path is empty"),
        ((), {"after": ("nothing",)}, "no run is called 'nothing'"),
    ],
)
def test_unusable_arguments_are_refused_before_anything_is_written(
    node: LoginNode, overrides: tuple[str, ...], options: dict[str, object], why: str
) -> None:
    before, jobs = node.tree(), len(node.jobs)
    with pytest.raises(BadInput, match=why):
        submit("demo", *overrides, **{"cluster": "lab", **options})
    assert (node.tree(), len(node.jobs)) == (before, jobs)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not the directory of a run"):
        Run(tmp_path)


def test_a_finished_local_run_is_a_finished_local_job(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert (Run(run.root).state, Run(run.root).job.get_info()) == ("new", {"jobState": "UNKNOWN"})
    run.attempt(1).folder.mkdir(parents=True)
    append(run.attempts_ledger, AttemptStart(1, 0.0, pid=4711))
    append(run.metrics, MetricsLine(3, {"mean_reward": 1.0}))
    end(run, 1, "finished")
    write(run.done, Done(1, 3, 0.0))
    job = Run(run.root).job
    assert isinstance(job, submitit.LocalJob)
    assert (job.job_id, job.state, job.done()) == ("4711", "FINISHED", True)
    assert job.result() == {"step": 3, "mean_reward": 1.0}
