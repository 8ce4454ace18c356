"""A command that ends a run never takes its name for that of another, nor for one of several: it asks, or refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from run_helpers import begin, end, submitted

from launcher.cli import cancel
from launcher.cli.main import main
from launcher.errors import BadInput
from launcher.host.record.identity import identify, note_submission
from launcher.runs import control
from launcher.runs.control import target_of


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm: a run with a job may be going on, for all we know


def refusal(name: str | None) -> str:
    with pytest.raises(BadInput) as caught:
        target_of(name)
    return "\n".join(caught.value.problems)


def test_without_a_name_the_only_run_that_is_alive_is_meant_and_that_is_asked(tmp_path):
    submitted(tmp_path / "first", job_id="7", cluster="lab")
    ended = submitted(tmp_path / "newer")
    begin(ended, 1)
    end(ended, 1, "drained")
    target = target_of(None)
    assert (target.status.name, target.doubt) == ("first", "no RUN was given")
    submitted(tmp_path / "second", job_id="8", cluster="lab")
    said = refusal(None)
    assert said.startswith("RUN is missing, and 2 runs may be meant; name one:\n  second (unknown) in ")
    assert "newer" not in said


def test_without_a_name_an_ended_run_is_never_meant(tmp_path):
    submitted(tmp_path / "never-started")
    assert "no run of this account is queued or running" in refusal(None)


def test_a_beginning_of_a_name_leaves_doubt_and_a_name_a_path_and_a_job_do_not(tmp_path, monkeypatch):
    run = submitted(tmp_path / "demo-1", job_id="7", cluster="lab")
    monkeypatch.chdir(tmp_path)
    for name in ("demo-1", str(run.root), "./demo-1", "7"):
        assert (target_of(name).status.name, target_of(name).doubt) == ("demo-1", ""), name
    monkeypatch.chdir("/")
    assert target_of("demo-1").doubt == ""
    assert target_of("demo").doubt == "'demo' is only the start of its name"


def test_an_earlier_job_of_a_run_does_not_stand_for_the_one_it_has_now(tmp_path):
    run = submitted(tmp_path / "a", job_id="9", cluster="lab")
    note_submission(run, "lab", "7")
    assert refusal("7") == "job 7 was an earlier job of a, which has job 9 now; name the run, or that job"


def test_a_copy_is_not_ended_in_place_of_the_run(tmp_path):
    run = submitted(tmp_path / "run", job_id="7", cluster="lab")
    identify(run)
    shutil.copytree(run.root, tmp_path / "copy")
    assert refusal(str(tmp_path / "copy")).startswith(f"{tmp_path}/copy: is a copy of {run.root}, which is another run")


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of runs that are ended; one run may be alive."""
    submitted(tmp_path / "demo-1", job_id="7", cluster="lab")
    names: list[str] = []
    monkeypatch.setattr(control, "cancel", lambda status, drain: names.append(status.name) or "cancelled")
    monkeypatch.setattr(control, "requeue", lambda status, now: names.append(status.name) or "requeued")
    return names


def mrl(*words: str, answer: str = "") -> Result:
    return CliRunner().invoke(main, words, input=answer)


@pytest.mark.parametrize("command", ["cancel", "requeue"])
@pytest.mark.parametrize("name", [(), ("demo",)])
def test_a_script_must_name_the_run_or_confirm(ended, command, name):
    done = mrl(command, *name)
    assert (done.exit_code, ended) == (2, []), done.output
    assert f"this would {command}" in done.stderr and "--yes" in done.stderr
    assert mrl(command, *name, "--yes").exit_code == 0
    assert mrl(command, "demo-1").exit_code == 0
    assert ended == ["demo-1", "demo-1"]


def test_a_user_is_asked(ended, monkeypatch):
    monkeypatch.setattr(cancel, "at_terminal", lambda: True)
    done = mrl("cancel", answer="n\n")
    assert (done.exit_code, ended) == (1, [])
    assert "no RUN was given: cancel " in done.stderr and "demo-1 (unknown, job 7)? [y/N]" in done.stderr
    assert "nothing was done" in done.stderr
    assert mrl("cancel", "--json", answer="y\n").stdout.startswith("{")
    assert ended == ["demo-1"]


def test_two_matching_runs_are_refused_even_with_yes(ended, tmp_path):
    submitted(tmp_path / "demo-2", job_id="8", cluster="lab")
    for words in (("cancel", "--yes"), ("cancel", "demo", "--yes"), ("cancel", "", "--yes")):
        assert mrl(*words).exit_code == 2
    assert ended == []
