"""Another user of the machine reads nothing of a run, and cannot change it. Needs root, to become another user."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from run_helpers import fake_ranks

OTHER = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that all users can enter and read, such as a project's; pytest's own are private."""
    with tempfile.TemporaryDirectory(prefix="mrl-shared-") as folder:
        Path(folder).chmod(0o755)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("XDG_STATE_HOME", f"{folder}/state")
        monkeypatch.setenv("MRL_CLUSTERS", "")
        monkeypatch.delenv("MRL_CLUSTER", raising=False)
        yield Path(folder)


def succeeds(*words: str | Path) -> bool:
    """Whether another user succeeds with a command."""
    return subprocess.run([*OTHER, *map(str, words)], capture_output=True).returncode == 0


def submit(run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return commands.run(["mrl-submit", "demo", "--run-dir", str(run), *words], before=fake_ranks("train"))


def test_another_user_reads_and_writes_nothing_of_a_run(shared: Path) -> None:
    run = shared / "run"
    done = submit(run)
    assert done.returncode == 0, done.stderr
    assert "warning: other users" not in done.stderr
    assert succeeds("ls", shared), "the directory above is open"
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if succeeds("cat", path)] == []
    assert not succeeds("ls", run)
    assert not succeeds("touch", run / "checkpoints" / "planted")
    assert not succeeds("mv", run / "resolved.yaml", run / "moved")


def test_a_group_that_may_read_a_run_can_write_nothing_in_it(shared: Path) -> None:
    run = shared / "run"
    run.mkdir()
    run.chmod(0o2750)
    before = os.umask(0o002)
    try:
        done = submit(run)
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    made = [path for path in run.rglob("*") if not path.is_symlink()]
    assert len(made) > 5
    assert [path for path in made if path.stat().st_mode & 0o022] == []


def test_a_directory_that_others_can_read_is_warned_of(shared: Path) -> None:
    run = shared / "run"
    run.mkdir(mode=0o755)
    done = submit(run)
    assert done.returncode == 0, done.stderr
    assert f"warning: other users can read {run}, with prompts, answers and logs of the run" in done.stderr
    assert succeeds("cat", run / "resolved.yaml"), "the warning is right"
    assert not succeeds("touch", run / "planted")


@pytest.mark.parametrize("owner", [0, 65534], ids=["all can write", "another user's"])
def test_a_directory_that_others_can_change_is_refused(shared: Path, owner: int) -> None:
    run = shared / "run"
    run.mkdir()
    run.chmod(0o777 if owner == 0 else 0o755)
    os.chown(run, owner, owner)
    assert succeeds("touch", run / "planted"), "another user could replace files of the run"
    (run / "planted").unlink()
    done = submit(run)
    assert done.returncode == 2
    assert ("all users can write there" if owner == 0 else "belongs to") in done.stderr
    assert list(run.iterdir()) == []
