"""A path to load a policy from is checked before a process with torch is started, and whose files they are."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from run_helpers import make_run

from launcher.cli.main import main
from launcher.cli.mrl_submit import main as mrl_submit
from launcher.cli.serve import make_token_file
from launcher.errors import BadInput
from launcher.host.record.identity import note_submission
from launcher.runs import writers
from launcher.runs.owner import refuse_others
from launcher.runs.policy_path import prepare_policy
from megatron_rl.contract.files import owner_name
from megatron_rl.contract.paths import RunDir


def test_runs_checkpoints_weights_and_names_in_the_cache_may_hold_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    checkpoint = run.checkpoint(40)
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").touch()
    (tmp_path / "home" / "hub" / "models--Qwen--Tiny" / "snapshots").mkdir(parents=True)
    (tmp_path / "home" / "mrl" / "packages" / "some-package").mkdir(parents=True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for path in (run.root, checkpoint, weights, "Qwen/Tiny", "package:some-package"):
        assert prepare_policy(str(path), trusted=False) == str(path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    note_submission(run, "local", None)
    assert prepare_policy("run", trusted=False) == str(run.root)


def test_what_cannot_hold_one_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    file = tmp_path / "file"
    file.touch()
    for path, said in (
        ("", "PATH is empty"),
        (tmp_path / "nothing", "no such directory"),
        ("Qwen/Tiny", "nothing of that name in the Hugging Face cache"),
        (tmp_path, "is neither a run directory"),
        (file, "is neither a run directory"),
        (make_run(tmp_path / "young").root, "has no checkpoint yet"),
        ("x" * 5000, "File name too long"),
        ("\0", "no such directory"),
    ):
        with pytest.raises(BadInput, match=said):
            prepare_policy(str(path), trusted=False)


def test_a_token_is_made_once_for_this_account_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config" / "token"
    make_token_file(file)
    token = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600 and len(token.strip()) > 40
    make_token_file(file)
    assert file.read_text() == token and not capsys.readouterr().err
    file.chmod(0o644)
    make_token_file(file)
    assert "other users can read" in capsys.readouterr().err
    with pytest.raises(BadInput, match="cannot be created: "):
        make_token_file(file / "token")


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


@pytest.mark.parametrize(("group", "refused"), [("lab", True), (owner_name(os.geteuid()), False)])
def test_a_directory_that_a_group_can_write_is_refused(tmp_path, monkeypatch, group, refused):
    """The umask 002 is common; a group of the user's own name has no other members."""
    tmp_path.chmod(0o2775)
    monkeypatch.setattr(writers.grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=group))
    run = RunDir(tmp_path)
    if refused:
        with pytest.raises(BadInput, match=r"the group lab can write there, .*: chmod go-w"):
            refuse_others(run, trusted=False)
    refuse_others(run, trusted=refused)


def test_what_another_user_wrote_is_refused(theirs):
    (theirs.checkpoints / "step-000040").mkdir()
    with pytest.raises(BadInput, match="belongs to user 12345"):
        prepare_policy(str(theirs.root), trusted=False)
    prepare_policy(str(theirs.root), trusted=True)
    with pytest.raises(BadInput, match=r"checkpoints: belongs to user 12345, .*--trust"):
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
