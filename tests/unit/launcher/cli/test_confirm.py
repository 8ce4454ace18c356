"""A command that ends a run asks at the terminal which one is meant; without a terminal it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from run_helpers import submitted

from launcher.cli import cancel
from launcher.cli.main import main
from launcher.runs import control


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of runs that are ended; one run may be alive."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(tmp_path))
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
