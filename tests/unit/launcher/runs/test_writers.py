"""Others who can write in a directory above a run can put theirs in its place: a submission warns of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from launcher.cli.mrl_submit import main as mrl_submit
from launcher.runs import writers
from launcher.runs.writers import warning_of_replacers


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that all users can enter; pytest's own are private."""
    monkeypatch.setattr(writers.grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="lab"))
    with tempfile.TemporaryDirectory(prefix="mrl-lab-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize(("mode", "who"), [(0o2775, "the group lab"), (0o777, "all users")])
@pytest.mark.parametrize("below", ["run", "runs/run", "runs/of/ada/run"])
def test_who_can_write_in_a_directory_above_is_named(lab, mode, who, below):
    (lab / "runs").mkdir(mode=0o755)
    lab.chmod(mode)
    said = warning_of_replacers(lab / below)
    assert f"{who} can write in {lab}, and so replace runs in {(lab / below).parent} and their logs" in said
    assert f"chmod +t {lab}" in said


@pytest.mark.parametrize("mode", [0o755, 0o1777, 0o3775])
def test_where_they_cannot_or_a_sticky_bit_keeps_them_from_it_nothing_is_said(lab, mode):
    lab.chmod(mode)
    assert warning_of_replacers(lab / "run") is None


def test_nobody_writes_below_a_directory_that_its_owner_alone_can_enter(lab):
    (lab / "runs").mkdir()
    (lab / "runs").chmod(0o777)
    lab.chmod(0o700)
    assert warning_of_replacers(lab / "runs" / "run") is None


def test_links_on_the_way_are_followed(lab, tmp_path):
    lab.chmod(0o777)
    (lab / "runs").mkdir()
    (tmp_path / "scratch").symlink_to(lab / "runs")
    assert f"can write in {lab}" in warning_of_replacers(tmp_path / "scratch" / "run")


def test_a_submission_warns_once_also_of_the_folder_of_runs_without_a_name(lab, monkeypatch):
    lab.chmod(0o777)
    monkeypatch.chdir(lab)
    for words in (["--run-dir", str(lab / "run")], []):
        said = CliRunner().invoke(mrl_submit, ["demo", "--cluster", "local", "--dry-run", *words]).stderr
        assert said.count(f"warning: all users can write in {lab}, and so replace runs in") == 1, said
        trusting = CliRunner().invoke(mrl_submit, ["demo", "--cluster", "local", "--dry-run", "--trust", *words])
        assert "can write in" not in trusting.stderr
