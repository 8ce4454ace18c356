"""The checkpoint a start finds, and the files after publication. No torch: folders and manifests only."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.checkpoint.publish import Latest, clean_up, find_latest, pass_over, publish
from megatron_rl.contract.manifest import CheckpointError, FileRecord, Manifest, find_defect, read_manifest
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.save_section import SaveConfig


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    clean_up(run_dir)
    return run_dir


def make(
    run_dir: RunDir,
    step: int,
    content: bytes = b"shard",
    save_id: str = "a-1",
    parent: int | None = None,
    **config: int,
) -> Path:
    """Publish the checkpoint of `step`, after the newest one unless `parent` is given."""
    folder = run_dir.unfinished_checkpoint(step, save_id)
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(content)
    files = {"__0_0.distcp": FileRecord(len(content), hashlib.sha256(content).hexdigest())}
    before = find_latest(run_dir).step if parent is None else parent
    publish(run_dir, folder, Manifest(step, save_id, 1, before, 0.5, 2.0, {"step": step}, files), SaveConfig(**config))
    return run_dir.checkpoint(step)


def names(run_dir: RunDir) -> list[str]:
    return sorted(path.name for path in run_dir.checkpoints.iterdir())


def test_the_newest_is_found_by_number_and_not_by_name(run_dir: RunDir) -> None:
    for step in (999_998, 1_000_002):
        make(run_dir, step)
    assert find_latest(run_dir).step == 1_000_002


def test_latest_names_the_published_checkpoint_and_nothing_else_is_left(run_dir: RunDir) -> None:
    make(run_dir, 20)
    make(run_dir, 40)
    assert run_dir.latest_checkpoint.read_text() == "step-000040\n"
    assert names(run_dir) == ["latest", "step-000020", "step-000040"]


def test_the_newest_n_are_kept(run_dir: RunDir) -> None:
    for step in (20, 40, 60, 80):
        make(run_dir, step, keep=2)
    assert names(run_dir) == ["latest", "step-000060", "step-000080"]


def test_checkpoints_of_every_mth_step_stay_for_good(run_dir: RunDir) -> None:
    for step in range(10, 101, 10):
        make(run_dir, step, keep=2, keep_every=40)
    assert run_dir.checkpoint_steps() == [100, 90, 80, 40]


def test_a_damaged_checkpoint_does_not_count_as_kept_and_is_deleted_when_superseded(run_dir: RunDir) -> None:
    make(run_dir, 20)
    (make(run_dir, 40) / "__0_0.distcp").unlink()
    make(run_dir, 60, parent=40, keep=2)
    assert run_dir.checkpoint_steps() == [60, 40, 20]
    make(run_dir, 80, keep=2)
    assert run_dir.checkpoint_steps() == [80, 60]


@pytest.fixture
def failing_check(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, OSError | None], None]:
    """Make every check of a checkpoint's files fail, or see an old size."""

    def arrange(step: int, error: OSError | None) -> None:
        original = Path.stat

        def stat(path: Path, **options: bool) -> os.stat_result:
            if path.parent.name == f"step-{step:06d}" and path.name.startswith("__0_0"):
                if error is not None:
                    raise error
                return original(path.parent / "manifest.json", **options)
            return original(path, **options)

        monkeypatch.setattr(Path, "stat", stat)

    return arrange


CHECKS = [OSError(errno.EIO, "Input/output error"), OSError(errno.ESTALE, "Stale file handle"), None]


@pytest.mark.parametrize("error", CHECKS)
def test_no_failed_check_deletes_the_newest_checkpoint(run_dir: RunDir, failing_check, error: OSError | None) -> None:
    make(run_dir, 20)
    failing_check(40, error)
    make(run_dir, 40, keep=1)
    assert run_dir.checkpoint_steps() == [40]
    assert run_dir.latest_checkpoint.read_text() == "step-000040\n"


def test_an_old_size_of_a_file_is_looked_at_again_in_the_open_file(run_dir: RunDir, failing_check) -> None:
    """A node may keep the size of another node's file for a minute, but not when it opens the file."""
    make(run_dir, 20)
    failing_check(20, None)
    assert find_defect(run_dir.checkpoint(20)) is None


@pytest.mark.parametrize("error", CHECKS[:2])
def test_a_checkpoint_that_looks_bad_stays_beside_the_good_ones(run_dir: RunDir, failing_check, error) -> None:
    for step in (10, 20, 30):
        make(run_dir, step, keep=3)
    failing_check(30, error)
    make(run_dir, 40, parent=30, keep=2)
    assert run_dir.checkpoint_steps() == [40, 30, 20]


def test_a_failure_after_the_rename_leaves_the_new_and_the_older_checkpoints(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(run_dir, 20)
    original = Path.replace

    def replace(path: Path, target: Path) -> Path:
        if path.name == "latest":
            raise OSError(errno.EIO, "Input/output error")
        return original(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    make(run_dir, 40, keep=1)
    assert run_dir.checkpoint_steps() == [40, 20]
    assert "step 40 is published, but superseded ones could not be deleted" in caplog.text


def test_a_checkpoint_is_durable_before_older_ones_are_deleted(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power cut could leave neither."""
    make(run_dir, 20)
    durable: list[tuple[list[int], str]] = []
    original = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), run_dir.checkpoints.stat()):
            durable.append((run_dir.checkpoint_steps(), run_dir.latest_checkpoint.read_text()))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    make(run_dir, 40, keep=1)
    assert durable[0] == ([40, 20], "step-000040\n")
    assert run_dir.checkpoint_steps() == [40]


def test_all_files_are_durable_before_publication(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a power cut could leave a checkpoint without its manifest."""
    changes: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        for folder in run_dir.checkpoints.iterdir():
            if folder.is_dir() and os.path.samestat(os.fstat(descriptor), folder.stat()):
                changes.append(f"{len(list(folder.iterdir()))} names")
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        changes.append(target.name)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    make(run_dir, 20)
    assert changes == ["4 names", "step-000020"], "the shard, the manifest, `saved.json` and where `latest` waits"


def test_a_failed_replacement_leaves_the_old_checkpoint(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    make(run_dir, 40, content=b"one")
    original = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path == run_dir.unfinished_checkpoint(40, "a-2"):
            raise OSError(errno.EIO, "Input/output error")
        return original(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        make(run_dir, 40, content=b"another", save_id="a-2")
    assert (run_dir.checkpoint(40) / "__0_0.distcp").read_bytes() == b"one"


def test_later_checkpoints_of_an_abandoned_line_are_deleted(run_dir: RunDir) -> None:
    """The run fell back to step 20 and continued: the next start must not find step 40 of the other line."""
    make(run_dir, 20)
    make(run_dir, 40)
    make(run_dir, 30, parent=20, keep=2)
    assert names(run_dir) == ["latest", "step-000020", "step-000030"]


def test_a_checkpoint_that_was_passed_over_is_no_longer_found_and_deleted_by_the_next_save(run_dir: RunDir) -> None:
    for step in (20, 40, 60):
        make(run_dir, step, keep=3)
    pass_over(run_dir, [40, 60], 20)
    assert names(run_dir) == ["latest", "step-000020", "step-000040.passed-over", "step-000060.passed-over"]
    assert run_dir.latest_checkpoint.read_text() == "step-000020\n"
    clean_up(run_dir)
    assert find_latest(run_dir) == Latest(20, ())
    assert run_dir.passed_over_steps() == [40, 60]
    make(run_dir, 30, keep=2)
    assert names(run_dir) == ["latest", "step-000020", "step-000030"]


def test_a_checkpoint_is_passed_over_although_an_earlier_one_of_its_step_was(run_dir: RunDir) -> None:
    make(run_dir, 20)
    earlier = make(run_dir, 40, b"earlier").rename(run_dir.root / "earlier")
    make(run_dir, 40, b"later", parent=20)
    earlier.rename(run_dir.passed_over_checkpoint(40))  # the save could not delete it
    pass_over(run_dir, [40], 20)
    assert (run_dir.passed_over_checkpoint(40) / "__0_0.distcp").read_bytes() == b"later"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "__0_0.distcp").unlink(), "is missing"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(b"shar"), "has 4 bytes, 5 were written"),
        (lambda folder: (folder / "manifest.json").unlink(), "has no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text('{"step": 4'), "is damaged"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "is damaged"),
        (lambda folder: (folder / "manifest.json").write_text('{"files": {"a": {"size": 1}}}'), "is damaged"),
    ],
)
def test_a_torn_checkpoint_is_skipped_with_a_reason(run_dir: RunDir, damage, said: str) -> None:
    make(run_dir, 20)
    damage(make(run_dir, 40))
    latest = find_latest(run_dir)
    assert latest.step == 20
    assert len(latest.passed_over) == 1
    assert latest.passed_over[0].startswith("checkpoint of step 40 passed over: ")
    assert said in latest.passed_over[0]


def test_the_manifest_reads_back_as_it_was_written(run_dir: RunDir) -> None:
    folder = make(run_dir, 40)
    assert read_manifest(folder) == Manifest(
        40,
        "a-1",
        1,
        None,
        0.5,
        2.0,
        {"step": 40},
        {"__0_0.distcp": FileRecord(5, hashlib.sha256(b"shard").hexdigest())},
    )
    assert find_defect(folder) is None


def test_a_manifest_of_another_version_is_refused(run_dir: RunDir) -> None:
    path = make(run_dir, 40) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layout": "new"}))
    with pytest.raises(CheckpointError, match="damaged"):
        read_manifest(path.parent)


def test_a_start_deletes_the_debris_of_a_crash(run_dir: RunDir) -> None:
    make(run_dir, 20)
    debris = run_dir.unfinished_checkpoint(40, "a-2")
    debris.mkdir()
    (debris / "__0_0.distcp").write_bytes(b"half")
    clean_up(run_dir)
    assert names(run_dir) == ["latest", "step-000020"]


@pytest.mark.parametrize("name", ["step-000020.old", "step-000020.bak", "mine.tmp", ".step-000020.mine"])
def test_files_of_the_user_beside_the_checkpoints_stay(run_dir: RunDir, name: str) -> None:
    make(run_dir, 20)
    (run_dir.checkpoints / name).mkdir()
    clean_up(run_dir)
    assert names(run_dir) == sorted(["latest", "step-000020", name])


def test_debris_that_cannot_be_deleted_does_not_stop_the_run(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that Slurm has given up may still run and write into its save."""
    run_dir.unfinished_checkpoint(40, "dead").mkdir()
    run_dir.checkpoint(20).mkdir()
    (run_dir.checkpoints / ".step-000020.old.tmp").mkdir()

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setattr(os, "rmdir", refuse)
    clean_up(run_dir)


def test_a_crash_between_the_two_renames_of_a_replacement_loses_nothing(run_dir: RunDir) -> None:
    make(run_dir, 40).rename(run_dir.checkpoints / ".step-000040.old.tmp")
    clean_up(run_dir)
    assert find_latest(run_dir).step == 40
    assert names(run_dir) == ["latest", "step-000040"]


def test_a_manifest_that_was_changed_is_refused(run_dir: RunDir) -> None:
    path = make(run_dir, 40) / "manifest.json"
    text = path.read_text()
    assert text.count(": 40") == 2
    path.write_text(text.replace(": 40", ": 41"))
    with pytest.raises(CheckpointError, match="SHA-256"):
        read_manifest(path.parent)
