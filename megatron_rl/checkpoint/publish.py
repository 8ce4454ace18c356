"""What makes a checkpoint one: the manifest, the rename that publishes, the search for the newest good one.

    checkpoints/step-000040/          published: renamed into place after manifest.json, its last file, was on disk
    checkpoints/step-000040.ID.tmp/   being written; debris after a crash
    checkpoints/step-000040.old/      replaced by a newer save of the same step; deleted once that one is in place
    checkpoints/latest                name of the newest one, for people and scripts; nothing here relies on it

Standard library only: a launcher can ask what a run has saved without importing torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.run_dir import RunDir, write_atomic, write_json

MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or used; the message says which, why and what to do."""


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
    meta: dict[str, Any]
    """What the caller of `save` wanted remembered."""
    files: dict[str, FileRecord]
    """Every file but the manifest itself, by name."""

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
    """Raises CheckpointError where `folder` is no published checkpoint or its manifest is not one of ours."""
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        files = {name: FileRecord(**record) for name, record in raw.pop("files").items()}
        return Manifest(files=files, **raw)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint of mrl: it has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); use another checkpoint") from error


def find_defect(folder: Path) -> str | None:
    """Why the checkpoint in `folder` cannot be used, judged by the names and sizes of its files; None if it can."""
    try:
        files = read_manifest(folder).files
    except CheckpointError as error:
        return str(error)
    for name, record in files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{folder / name} is missing"
        if size != record.bytes:
            return f"{folder / name} has {size} bytes, {record.bytes} were written"
    return None


def find_corruption(folder: Path, files: dict[str, FileRecord]) -> str | None:
    """The first of `files` whose content is not what was written, judged by its SHA-256; None if all are good."""
    for name, record in files.items():
        try:
            if hash_file(folder / name) != record:
                return f"the content of {folder / name} is not what was written (SHA-256 differs)"
        except FileNotFoundError:
            return f"{folder / name} is missing"
    return None


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


def publish(run_dir: RunDir, folder: Path, manifest: Manifest, keep: int) -> None:
    """Turn the complete `folder` into the checkpoint of `manifest.step`, move `latest`, drop what is superseded.

    Raises OSError with the previous checkpoint and `latest` as they were. The rename is the moment of truth: a
    crash before it leaves debris, a crash after it a checkpoint.
    """
    target = run_dir.checkpoint(manifest.step)
    replaced = target.with_suffix(".old")
    # All that needs space on the disk happens before the rename, so that a full one cannot leave a half-moved state:
    # the new `latest` waits inside the folder.
    write_atomic(folder / run_dir.latest_checkpoint.name, target.name + "\n")
    write_json(folder / MANIFEST, dataclasses.asdict(manifest))
    _sync_folder(folder)
    if target.exists():
        target.rename(replaced)
    folder.rename(target)
    (target / run_dir.latest_checkpoint.name).replace(run_dir.latest_checkpoint)
    _sync_folder(run_dir.checkpoints)
    shutil.rmtree(replaced, ignore_errors=True)
    _prune(run_dir, manifest.step, keep)


def discard(folder: Path) -> None:
    """Delete a checkpoint so that no moment shows a half-deleted one as published. What cannot be deleted now is
    debris, deleted by the next start."""
    debris = folder if folder.suffix == ".tmp" else folder.with_name(folder.name + ".tmp")
    with suppress(OSError):
        folder.rename(debris)
    shutil.rmtree(debris, ignore_errors=True)


def clean_up(run_dir: RunDir) -> None:
    """Delete what a crash left behind. Only the owner of the run directory may, before any rank saves."""
    run_dir.checkpoints.mkdir(parents=True, exist_ok=True)
    for replaced in run_dir.checkpoints.glob("step-*.old"):
        # Crashed between the two renames of `publish`: the old one is still the checkpoint of its step.
        target = replaced.with_suffix("")
        if target.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(target)
    for debris in run_dir.checkpoints.glob("*.tmp"):
        shutil.rmtree(debris)


def _prune(run_dir: RunDir, step: int, keep: int) -> None:
    """Keep the newest `keep` good checkpoints up to `step`. Later ones were passed over when the run resumed: they
    belong to a line of training that this checkpoint has replaced, and must not be found by the next start."""
    kept = 0
    for candidate in run_dir.checkpoint_steps():
        folder = run_dir.checkpoint(candidate)
        if candidate <= step and kept < keep and find_defect(folder) is None:
            kept += 1
        else:
            discard(folder)


def _sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, as fsync of a file makes its content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
