"""A run of another user is not run as oneself unless one says so (S3)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from run_helpers import make_run

from launcher.cli.main import main
from launcher.cli.mrl_submit import main as mrl_submit
from launcher.errors import BadInput
from launcher.runs.owner import refuse_others
from megatron_rl.contract.paths import RunDir


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Its checkpoints are another user's."""
    run = make_run(tmp_path / "run")
    run.checkpoints.mkdir()
    real = Path.stat

    def stat(path, *more, **options):
        found = real(path, *more, **options)
        uid = 12345 if path == run.checkpoints else os.geteuid()
        return os.stat_result((*found[:4], uid, *found[5:]))

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return run


def test_what_another_user_wrote_is_refused(theirs):
    with pytest.raises(BadInput, match=r"checkpoints: belongs to user 12345; .*unpickled.*--trust"):
        refuse_others(theirs, trusted=False)
    refuse_others(theirs, trusted=True)


def test_the_commands_that_go_on_with_a_run_ask_for_trust(theirs):
    root = str(theirs.root)
    for program, words in (
        (main, ("resume", root, "--dry-run")),
        (main, ("fork", root, "--dry-run")),
        (mrl_submit, ("demo", "--run-dir", root, "--dry-run")),
    ):
        done = CliRunner().invoke(program, words)
        assert (done.exit_code, "belongs to user 12345" in done.stderr) == (2, True), (words, done.output)
        assert "belongs to" not in CliRunner().invoke(program, (*words, "--trust")).output
