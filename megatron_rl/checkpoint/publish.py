"""What makes a checkpoint one: the manifest, the rename that publishes, the search for the newest good one.

    checkpoints/step-000040/          published: renamed into place after manifest.json, its last file, was on disk
    checkpoints/step-000040.ID.tmp/   being written; debris after a crash
    checkpoints/.step-000040.old.tmp/ replaced by a newer save of the same step; deleted once that one is in place
    checkpoints/latest                name of the newest one, for people and scripts; nothing here relies on it

No torch: a launcher can ask what a run has saved without importing it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.config import SaveConfig
from megatron_rl.contract.files import read_bytes, write_atomic
from megatron_rl.contract.paths import RunDir

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"

# What is deleted here is named like nothing that a user would keep: step-000040.old is theirs.
OLD = ".old.tmp"
_OLD = re.compile(r"\.step-\d{6,}\.old\.tmp")
_DEBRIS = re.compile(r"step-\d{6,}(\..+)?\.tmp")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or used; the message says which, why and what to do."""


class Damaged(CheckpointError):
    """A checkpoint is not what was written or cannot be read; another one may be good."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint, as it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    step: int
    save_id: str
    """Unique per save; tells a save from another of the same step."""
    world_size: int
    """Ranks that wrote it. It loads into any other number."""
    parent: int | None
    """Step of the checkpoint before it in its line of training; None: the run had none."""
    blocked_s: float
    """How long the save kept the training loop, on rank 0."""
    total_s: float
    """From the start of the save to this manifest."""
    meta: dict[str, Any]
    """What the caller of `save` wanted remembered."""
    files: dict[str, FileRecord]
    """Every file but the manifest itself, by name."""

    @property
    def digest(self) -> str:
        """Hash of the content alone: another save of the same state has another one only where a file differs."""
        return _digest({name: record.sha256 for name, record in self.files.items()})

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())


@dataclass(frozen=True)
class Latest:
    """Result of `find_latest`."""

    step: int | None
    """Newest good checkpoint; None where there is none."""
    passed_over: tuple[str, ...]
    """One line for the log per newer checkpoint that is not usable."""


def read_manifest(folder: Path) -> Manifest:
    """Raises Damaged where `folder` is no published checkpoint or its manifest is not as we wrote it."""
    path = folder / MANIFEST
    try:
        raw = json.loads(read_bytes(path))
        if raw.pop("sha256") != _digest(raw):
            raise ValueError("its SHA-256 differs")
        files = {name: FileRecord(**record) for name, record in raw.pop("files").items()}
        return Manifest(files=files, **raw)
    except FileNotFoundError:
        raise Damaged(f"{folder} is not a checkpoint of mrl: it has no {MANIFEST}") from None
    except OSError as error:
        raise Damaged(_unreadable(path, error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path} is damaged ({error}); use another checkpoint") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    raw = dataclasses.asdict(manifest)
    text = json.dumps({**raw, "sha256": _digest(raw)}, indent=1, sort_keys=True)
    write_atomic(folder / MANIFEST, text + "\n")


def _digest(raw: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode("utf-8")).hexdigest()


def find_defect(folder: Path) -> str | None:
    """Why the checkpoint in `folder` cannot be used, judged by the names and sizes of its files; None if it can."""
    try:
        files = read_manifest(folder).files
    except Damaged as error:
        return str(error)
    return _first(_find_wrong_size(folder / name, record) for name, record in files.items())


def find_corruption(folder: Path, files: dict[str, FileRecord]) -> str | None:
    """The first of `files` whose content is not what was written, judged by its SHA-256, or that cannot be read; None
    if all are good."""
    sizes = (_find_wrong_size(folder / name, record) for name, record in files.items())
    return _first(sizes) or _first(_find_wrong_content(folder / name, record) for name, record in files.items())


def _first(problems: Iterable[str | None]) -> str | None:
    return next(filter(None, problems), None)


def _find_wrong_size(path: Path, record: FileRecord) -> str | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return _unreadable(path, error)
    if not stat.S_ISREG(found.st_mode):
        return f"{path} is not a regular file"
    return None if found.st_size == record.bytes else f"{path} has {found.st_size} bytes, {record.bytes} were written"


def _find_wrong_content(path: Path, record: FileRecord) -> str | None:
    try:
        same = hash_file(path) == record
    except OSError as error:
        return _unreadable(path, error)
    return None if same else f"the content of {path} is not what was written (SHA-256 differs)"


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path} cannot be read: {error.strerror or error}"


def hash_file(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(bytes=file.tell(), sha256=digest.hexdigest())


def find_latest(run_dir: RunDir) -> Latest:
    """The newest checkpoint of the run whose files are all there at full size."""
    passed_over: list[str] = []
    for step in run_dir.checkpoint_steps():
        defect = find_defect(run_dir.checkpoint(step))
        if defect is None:
            return Latest(step, tuple(passed_over))
        passed_over.append(f"checkpoint of step {step} passed over: {defect}")
    return Latest(None, tuple(passed_over))


def newest_step(run_dir: RunDir) -> int:
    """The step of the newest good checkpoint of a run, for whoever only reads it.

    Raises:
        CheckpointError: the run has none.
    """
    found = find_latest(run_dir)
    for line in found.passed_over:
        logger.warning(line)
    if found.step is not None:
        return found.step
    if found.passed_over:
        raise CheckpointError(f"{run_dir.root} has no good checkpoint: {'; '.join(found.passed_over)}")
    raise CheckpointError(f"{run_dir.root} has no checkpoint yet; `mrl status {run_dir.root}` says what the run does")


def publish(run_dir: RunDir, folder: Path, manifest: Manifest, config: SaveConfig) -> None:
    """Turn the complete `folder` into the checkpoint of `manifest.step`, move `latest`, drop what is superseded.

    Raises OSError with the previous checkpoint and `latest` as they were. The rename is the moment of truth: a
    crash before it leaves debris, a crash after it a checkpoint; and a file system that fails after it does not make
    the save a failed one, it only leaves older ones where they are.
    """
    target = run_dir.checkpoint(manifest.step)
    replaced = _replaced_by(target)
    # All that needs space on the disk happens before the rename, so that a full one cannot leave a half-moved state:
    # the new `latest` waits inside the folder.
    write_atomic(folder / run_dir.latest_checkpoint.name, target.name + "\n")
    write_manifest(folder, manifest)
    _sync_folder(folder)
    replaces = target.exists()
    if replaces:
        target.rename(replaced)
    try:
        folder.rename(target)
    except OSError:
        if replaces:
            with suppress(OSError):  # else the next start does it
                replaced.rename(target)
        raise
    try:
        (target / run_dir.latest_checkpoint.name).replace(run_dir.latest_checkpoint)
        _sync_folder(run_dir.checkpoints)
        shutil.rmtree(replaced, ignore_errors=True)
        _prune(run_dir, manifest, config)
    except OSError as error:
        logger.warning("the checkpoint of step %d is published, but what it supersedes stays: %s", manifest.step, error)


def discard(folder: Path) -> None:
    """Delete a checkpoint so that no moment shows a half-deleted one as published. What cannot be deleted now is
    debris, deleted by the next start."""
    debris = folder if folder.suffix == ".tmp" else folder.with_name(folder.name + ".tmp")
    with suppress(OSError):
        folder.rename(debris)
    shutil.rmtree(debris, ignore_errors=True)


def clean_up(run_dir: RunDir) -> None:
    """Delete what a crash left behind. Only the owner of the run directory may, before any rank saves. What cannot be
    deleted, because somebody still writes there, is left to the next start."""
    run_dir.checkpoints.mkdir(parents=True, exist_ok=True)
    left = sorted(run_dir.checkpoints.iterdir())
    for replaced in (path for path in left if _OLD.fullmatch(path.name)):
        # Crashed between the two renames of `publish`: the old one is still the checkpoint of its step.
        target = replaced.with_name(replaced.name.removeprefix(".").removesuffix(OLD))
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(target)
    for debris in (path for path in left if _DEBRIS.fullmatch(path.name)):
        shutil.rmtree(debris, ignore_errors=True)


def _replaced_by(target: Path) -> Path:
    """Path of a checkpoint until the one that replaces it is in its place."""
    return target.with_name(f".{target.name}{OLD}")


def _prune(run_dir: RunDir, newest: Manifest, config: SaveConfig) -> None:
    """Delete what `newest`, which has just been published, supersedes: of its line of training all before the newest
    `keep` good ones, but for those that stay for good or wait for their export; and whatever is newer than its parent,
    exports too. Those were passed over when the run resumed: this one has replaced their line, and they must not be
    found by the next start.

    A look at a file may be wrong for a moment on a network file system. So no look decides that one is deleted, only
    that it does not count among those kept; and the one just published is not looked at.
    """
    before = newest.step if newest.parent is None else newest.parent
    for step in run_dir.export_steps():
        if step > before or step == newest.step:
            discard(run_dir.export(step))
    kept = 1
    steps = run_dir.checkpoint_steps()
    waiting = waiting_for_export(run_dir, steps, config)
    for step in steps:
        if step == newest.step:
            continue
        folder = run_dir.checkpoint(step)
        stays = config.stays(step) or step in waiting
        if step > before or (kept >= config.keep and not stays):
            discard(folder)
        elif find_defect(folder) is None:
            kept += 1


def waiting_for_export(run_dir: RunDir, steps: Iterable[int], config: SaveConfig) -> list[int]:
    """Those of the published steps, newest first, that are still to be exported: the newest and the oldest, which comes
    first, and may be under way. Those in between are given up, where exports take longer than it is from one to the
    next: else each would lose its checkpoint before it is done, and none would ever be."""
    waiting = [step for step in steps if config.exported(step) and not run_dir.export(step).exists()]
    return waiting[:1] + waiting[1:][-1:]


def _sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, as fsync of a file makes its content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
