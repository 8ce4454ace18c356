"""Replicas in their own jobs, which come and go: what is submitted when, and that nothing of it ends a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.host.attempt import harvest as harvest_module
from launcher.host.attempt.harvest import LONGEST_PAUSE_S, LOOK_S, PAUSE_S, SHORT_S, Harvest, HarvestSettings
from launcher.host.attempt.job_context import JobContext
from launcher.host.attempt.slurm_steps import SlurmSteps
from launcher.host.record.evidence import read_replicas
from launcher.host.record.identity import identify
from launcher.host.slurm.call import SlurmRefused, SlurmSilent
from megatron_rl.contract.paths import RunDir


class Slurm:
    """Jobs by id, with their nodes; and what was submitted."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.jobs: dict[str, str] = {}
        self.submitted: list[dict[str, Any]] = []
        self.cancelled = 0
        self.error: Exception | None = None
        patch.setattr(harvest_module.queries, "jobs_called", self._called)
        patch.setattr(harvest_module.orders, "submit_command", self._submit)
        patch.setattr(harvest_module.orders, "cancel_called", self._cancel)
        patch.setattr(harvest_module.orders, "cancel", self.jobs.pop)

    def _called(self, name: str) -> dict[str, str]:
        if isinstance(self.error, SlurmSilent):
            raise self.error
        return dict(self.jobs)

    def _submit(self, options: list[str], command: list[str], environment: dict[str, str]) -> str:
        if self.error is not None:
            raise self.error
        self.submitted.append({"options": options, "command": command, "environment": environment})
        self.jobs[str(len(self.submitted))] = ""
        return str(len(self.submitted))

    def _cancel(self, name: str) -> None:
        self.cancelled += 1
        self.jobs.clear()


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(monkeypatch)


def harvest(tmp_path: Path, most: int = 2) -> Harvest:
    environ = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3", "MRL_RUN_DIR": "x"}
    run = RunDir(tmp_path / "run")
    context = JobContext(run, "lab", "7", ["n1"], environ=environ)
    attempt = run.attempt(3)
    attempt.folder.mkdir(parents=True)
    steps = SlurmSteps(context, "/the/job.sbatch", attempt, lock=0)
    return Harvest(context, steps, attempt, 1, HarvestSettings(most, ["--partition=idle", "--nodes=1"]))


def states(tmp_path: Path) -> dict[int, tuple[str, list[str]]]:
    found = read_replicas(RunDir(tmp_path / "run").attempt(3))
    return {each.replica: (each.state, list(each.hosts)) for each in found}


def test_as_many_jobs_as_asked_for_are_submitted_once_those_of_earlier_attempts_are_gone(
    tmp_path: Path, slurm: Slurm
) -> None:
    slurm.jobs["99"] = "n9"
    harvested = harvest(tmp_path)
    harvested.poll(0.0)
    harvested.poll(LOOK_S)
    assert slurm.cancelled == 1
    assert len(slurm.submitted) == 2
    first, second = slurm.submitted
    assert first["command"][-2:] == ["/the/job.sbatch", "harvest-1"]
    assert second["command"][-1] == "harvest-2"
    assert {"--partition=idle", "--nodes=1", "--no-requeue"} <= {*first["options"]}
    assert (first["environment"]["MRL_ATTEMPT"], first["environment"]["MRL_START"]) == ("3", "0")
    assert not [name for name in first["environment"] if name.startswith("SLURM_")], "it describes another job"
    assert states(tmp_path) == {1: ("waiting", []), 2: ("waiting", [])}


def test_jobs_are_those_of_one_run_also_where_another_directory_has_its_name(tmp_path: Path, slurm: Slurm) -> None:
    for folder in ("a", "b"):
        harvested = harvest(tmp_path / folder, most=1)
        identify(RunDir(tmp_path / folder / "run"))
        harvested.poll(0.0)
    of_a, of_b = ({*job["options"]} for job in slurm.submitted)
    assert len({each for each in of_a ^ of_b if each.startswith("--job-name=run-harvest-")}) == 2


def test_one_that_is_preempted_is_submitted_again_with_another_start(tmp_path: Path, slurm: Slurm) -> None:
    harvested = harvest(tmp_path, most=1)
    harvested.poll(0.0)
    slurm.jobs["1"] = "node[07-08]"
    harvested.poll(LOOK_S)
    assert states(tmp_path) == {1: ("running", ["node07", "node08"])}
    slurm.jobs.clear()
    over = LOOK_S + SHORT_S
    harvested.poll(over)
    assert len(slurm.submitted) == 1, "not at once"
    harvested.poll(over + PAUSE_S + LOOK_S)
    assert slurm.submitted[1]["environment"]["MRL_START"] == "1"
    assert states(tmp_path) == {1: ("waiting", [])}


def test_jobs_that_end_soon_are_submitted_less_and_less_often(tmp_path: Path, slurm: Slurm) -> None:
    harvested, now = harvest(tmp_path, most=1), 0.0
    for _ in range(2000):
        slurm.jobs.clear()
        harvested.poll(now)
        now += LOOK_S
    assert 5 < len(slurm.submitted) < 30


def test_one_that_ran_for_a_moment_has_ended_soon_too(tmp_path: Path, slurm: Slurm) -> None:
    harvested, now = harvest(tmp_path, most=1), 0.0
    for _ in range(1000):
        harvested.poll(now)
        slurm.jobs = dict.fromkeys(slurm.jobs, "n8")
        harvested.poll(now + LOOK_S)
        slurm.jobs.clear()
        now += 2 * LOOK_S
    assert 5 < len(slurm.submitted) < 30


def test_jobs_that_end_soon_for_weeks_end_no_run(tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for effect in ("write", "forget_start"):
        monkeypatch.setattr(harvest_module, effect, lambda *_: None)
    harvested = harvest(tmp_path, most=1)
    for number in range(2200):
        slurm.jobs.clear()
        harvested.poll(number * (LONGEST_PAUSE_S + LOOK_S))
    assert len(slurm.submitted) > 1050


def test_a_job_that_slurm_takes_without_a_word_is_not_left_to_itself(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter(["77", "78"])

    def silent(*_: Any) -> str:
        if (job := next(taken, None)) is None:
            return submit(*_)
        slurm.jobs[job] = ""
        raise SlurmSilent("sbatch: no answer within 30 s")

    submit = slurm._submit
    harvested = harvest(tmp_path)
    harvested.poll(0.0)
    monkeypatch.setattr(harvest_module.orders, "submit_command", silent)
    slurm.jobs.pop("1")
    for number in range(1, 30):
        harvested.poll(number * LOOK_S)
    assert slurm.jobs.keys() == {"2", "3"}


def test_a_job_that_is_submitted_on_a_full_disk_is_not_submitted_twice(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    harvested = harvest(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(harvest_module, "write", full)
        for number in range(4):
            harvested.poll(number * LONGEST_PAUSE_S)
    harvested.poll(4 * LONGEST_PAUSE_S)
    assert len(slurm.submitted) == 2


def test_what_slurm_refuses_is_said_once_and_tried_again_later(
    tmp_path: Path, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    harvested = harvest(tmp_path)
    slurm.error = SlurmRefused("sbatch: invalid partition specified: idle")
    harvested.poll(0.0)
    slurm.error = None
    harvested.poll(LONGEST_PAUSE_S - 1)
    assert not slurm.submitted, "who has refused is not asked all the time"
    slurm.error = SlurmRefused("sbatch: invalid partition specified: idle")
    harvested.poll(LONGEST_PAUSE_S)
    assert capsys.readouterr().out.count("invalid partition specified: idle") == 1
    slurm.error = None
    harvested.poll(2 * LONGEST_PAUSE_S)
    assert len(slurm.submitted) == 2


def test_a_silent_slurm_says_nothing_about_any_job(tmp_path: Path, slurm: Slurm) -> None:
    harvested = harvest(tmp_path)
    harvested.poll(0.0)
    slurm.error = SlurmSilent("squeue: no answer")
    harvested.poll(LOOK_S)
    slurm.error = None
    harvested.poll(2 * LOOK_S)
    assert len(slurm.submitted) == 2


def test_they_end_with_the_attempt(tmp_path: Path, slurm: Slurm) -> None:
    harvested = harvest(tmp_path)
    harvested.poll(0.0)
    harvested.stop()
    assert not slurm.jobs

    nothing = harvest(tmp_path / "other", most=0)
    nothing.poll(0.0)
    nothing.stop()
    assert slurm.cancelled == 2
