"""Large files of the checkpoints are spread over servers on Lustre, unless the site has its own layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.host.record import striping
from launcher.host.record.striping import make_checkpoints
from megatron_rl.contract.paths import RunDir

NO_LUSTRE = "echo 'error: getstripe failed: Inappropriate ioctl for device' >&2; exit 25"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def lfs(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """An lfs that runs this, first on PATH; the file in which its calls stand."""
    tools, calls = folder / "bin", folder / "calls"
    tools.mkdir()
    (tools / "lfs").write_text(f'#!/bin/sh\necho "$@" >>{calls}\n{script}\n')
    (tools / "lfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    calls.touch()
    return calls


def test_a_folder_that_nobody_has_laid_out_is_striped_once(run, tmp_path, monkeypatch):
    calls = lfs(tmp_path, monkeypatch, '[ "$1" = getstripe ] && echo 1')
    make_checkpoints(run)
    make_checkpoints(run)
    folder = run.checkpoints
    assert calls.read_text().splitlines() == [
        f"getstripe --directory --stripe-count {folder}",
        f"setstripe --component-end 1G --stripe-count 1 --component-end -1 --stripe-count 4 {folder}",
    ]


def test_the_layout_of_the_site_stays(run, tmp_path, monkeypatch):
    calls = lfs(tmp_path, monkeypatch, "echo 8")
    make_checkpoints(run)
    assert "setstripe" not in calls.read_text()
    assert run.checkpoints.is_dir()


def test_elsewhere_there_is_a_folder_and_not_a_word(run, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))  # no lfs
    make_checkpoints(run)
    assert run.checkpoints.is_dir()
    other = RunDir(tmp_path / "other")
    calls = lfs(tmp_path, monkeypatch, NO_LUSTRE)
    make_checkpoints(other)
    assert other.checkpoints.is_dir()
    assert "setstripe" not in calls.read_text()
    assert capfd.readouterr() == ("", "")


def test_neither_a_file_system_nor_an_lfs_that_does_not_answer_is_an_error(run, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    make_checkpoints(RunDir(tmp_path / "file"))
    monkeypatch.setattr(striping, "LIMIT_S", 0.2)
    lfs(tmp_path, monkeypatch, "exec sleep 3600")
    make_checkpoints(run)
    assert run.checkpoints.is_dir()
