"""The identity of a run directory that is copied, moved or linked, and of the jobs that belong to it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from run_helpers import make_run

from launcher.host.record import identity
from launcher.host.record.identity import comment_of, copied_from, identify, is_job_of, make_token
from megatron_rl.contract import records
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import UnreadableRecord, read
from megatron_rl.contract.run_records import Owner, RunIdentity

ID, OTHER = "a" * 32, "b" * 32


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = make_run(tmp_path / "run", job_id="7", cluster="lab")
    identify(found)
    return found


def original(path: Path) -> str | None:
    found = RunDir(path)
    return copied_from(found, read(RunIdentity, found.identity))


def test_an_identity_stays(run):
    assert identify(run) == identify(run)
    assert original(run.root) is None


@pytest.mark.parametrize("archive", [False, True])
def test_a_copy_is_another_run_until_it_has_an_identity_of_its_own(run, tmp_path, archive):
    copy = tmp_path / "copy"
    shutil.copytree(run.root, copy, copy_function=shutil.copy2 if archive else shutil.copy)
    (copy / "wandb.json").write_text("{}")
    assert original(copy) == str(run.root)
    assert original(run.root) is None
    assert identify(RunDir(copy)).id != identify(run).id
    assert original(copy) is None
    assert not (copy / "job.json").exists() and not (copy / "wandb.json").exists()
    assert run.job.exists()


def test_a_moved_run_is_the_same_and_what_was_copied_of_it_before_is_not(run, tmp_path):
    before = identify(run)
    shutil.copytree(run.root, tmp_path / "copy")
    moved = run.root.rename(tmp_path / "moved")
    assert original(moved) is None
    assert original(tmp_path / "copy") == str(run.root)
    after = identify(RunDir(moved))
    assert (after.id, after.path) == (before.id, str(moved))
    assert RunDir(moved).job.exists()


def test_a_run_that_another_one_took_the_place_of_is_still_itself(run, tmp_path):
    moved = run.root.rename(tmp_path / "moved")
    identify(make_run(run.root))
    assert original(moved) is None
    assert original(run.root) is None


def test_a_link_leads_to_the_same_run(run, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(run.root)
    assert original(tmp_path / "link") is None
    monkeypatch.chdir(tmp_path)
    assert original(Path("run")) is None
    before = identify(run).id
    assert identify(RunDir(tmp_path / "link")).id == before


def test_an_original_that_one_may_not_look_into_may_be_there(run, tmp_path, monkeypatch):
    shutil.copytree(run.root, tmp_path / "copy")
    stat = os.stat

    def denied(path, *more, **options):
        if str(path).startswith(str(run.root)):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *more, **options)

    monkeypatch.setattr(identity.os, "stat", denied)
    assert original(tmp_path / "copy") == str(run.root)


def test_an_identity_that_cannot_be_read_is_not_made_anew(run, monkeypatch):
    monkeypatch.setattr(records, "PATIENCE_S", 0.0)
    run.identity.write_text("{")
    with pytest.raises(UnreadableRecord, match=r"run\.json"):
        identify(run)


@pytest.mark.parametrize(
    ("comment", "name", "submitted_at", "restarts", "ours"),
    [
        (comment_of(ID), "run", 1000.0, 0, True),
        (comment_of(ID, "project=x"), "other", 1e9, 0, True),  # renamed by hand, its clock is wrong
        (comment_of(OTHER), "run", 1000.0, 0, False),
        ("project=x", "run", 1000.0, 0, True),
        ("", "run", 1e9, 0, True),
        ("", "other", 1000.0, 0, True),
        ("", "other", 1e9, 3, True),  # requeued
        ("", "other", 1e9, 0, False),
        ("", "other", None, 0, True),
    ],
)
def test_a_job_id_that_was_used_again_is_noticed(comment, name, submitted_at, restarts, ours):
    owner = Owner("7", "lab", 1000.0, run_id=ID, name="run")
    assert is_job_of(owner, comment, name, submitted_at, restarts) is ours


def test_a_comment_keeps_what_the_profile_says_in_it():
    assert comment_of(ID, "project=x") == f"project=x mrl:{ID}"


def test_a_token_is_made_once_and_only_its_owner_may_read_it(tmp_path):
    run = RunDir(tmp_path)
    make_token(run)
    text = run.token.read_text()
    assert len(text.split()) == 1
    assert len(text.strip()) >= 32
    assert run.token.stat().st_mode & 0o777 == 0o600
    make_token(run)
    assert run.token.read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize("damage", ["empty", "torn", "garbage", "readable by all"])
def test_one_that_is_damaged_or_that_others_could_read_is_replaced(tmp_path, damage):
    run = RunDir(tmp_path)
    make_token(run)
    before = run.token.read_text()
    changed = {"empty": "", "torn": before[:9] + "\n", "garbage": "\N{SNOWMAN}" * 40 + "\n"}
    run.token.write_text(changed.get(damage, before))
    if damage == "readable by all":
        run.token.chmod(0o644)
    make_token(run)
    assert run.token.read_text() not in (before, changed.get(damage))
    assert run.token.stat().st_mode & 0o777 == 0o600
