"""Published checkpoints: the manifest, the rename that publishes, the search for the newest good one.

    checkpoints/step-000040/          published: renamed into place once manifest.json, its last file, is on disk
    checkpoints/step-000040.ID.tmp/   being written; debris after a crash
    checkpoints/.step-000040.old.tmp/ replaced by a newer save of the same step; deleted once that one is in place
    checkpoints/step-000040.passed-over/ given up by a start that resumed from an earlier one; deleted by the next save
    checkpoints/latest                name of the newest one, for people and scripts; not read here

No torch: a launcher can look up saved steps without importing it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_rl.contract.files import until_written, write_atomic
from megatron_rl.contract.manifest import (
    CheckpointError,
    CheckpointSaved,
    Manifest,
    find_defect,
    found_twice,
    read_saved,
    write_manifest,
    write_saved,
)
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import PATIENCE_S
from megatron_rl.recipe.save_section import SaveConfig

logger = logging.getLogger(__name__)

# Names of deleted folders must differ from any a user would choose: step-000040.old belongs to the user.
OLD = ".old.tmp"
_OLD = re.compile(r"\.step-\d{6,}\.old\.tmp")
_DEBRIS = re.compile(r"step-\d{6,}(\..+)?\.tmp")


@dataclass(frozen=True)
class Latest:
    step: int | None  # newest good checkpoint; None without any
    passed_over: tuple[str, ...]  # log line for each newer checkpoint that is not usable


@dataclass(frozen=True)
class SaveFailed:
    step: int
    reason: str

    def __str__(self) -> str:
        return f"the checkpoint of step {self.step} was not saved: {self.reason}. The previous one is untouched"


SaveOutcome = CheckpointSaved | SaveFailed  # of a published checkpoint, rank 0's record on every rank


def find_latest(run_dir: RunDir) -> Latest:
    """Find the newest checkpoint of the run whose files all exist at full size."""
    passed_over: list[str] = []
    for step in run_dir.checkpoint_steps():
        defect = find_defect(run_dir.checkpoint(step))
        if defect is None:
            return Latest(step, tuple(passed_over))
        passed_over.append(f"checkpoint of step {step} passed over: {defect}")
    return Latest(None, tuple(passed_over))


def newest_step(run_dir: RunDir) -> int:
    """Return the step of the newest good checkpoint of a run. Only reads.

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
    """Publish the complete `folder` as the checkpoint of `manifest.step`, move `latest`, delete superseded ones.

    Raises OSError with the previous checkpoint and `latest` unchanged, also if files of the folder are missing or cut.
    The rename decides: a crash before it leaves debris, a crash after it a checkpoint. A file system that fails after
    the rename does not make the save fail; it only keeps superseded checkpoints.
    """
    target = run_dir.checkpoint(manifest.step)
    replaced = _replaced_by(target)
    # Everything that needs disk space comes before the rename, so that a full disk cannot leave a half-moved state: the
    # new `latest` waits inside the folder.
    write_atomic(folder / run_dir.latest_checkpoint.name, target.name + "\n")
    write_saved(folder, manifest.saved)
    write_manifest(folder, manifest)
    sync_names(folder)
    # Other ranks wrote most of the files, and what this checkpoint supersedes is deleted unread.
    if (defect := found_twice(lambda: find_defect(folder))) is not None:
        raise OSError(defect)
    replaces = target.exists()
    if replaces:
        target.rename(replaced)
    try:
        folder.rename(target)
    except OSError:
        # A network file system may report an error of a rename that it has done.
        saved = read_saved(target, PATIENCE_S)
        if saved is None or saved.save_id != manifest.save_id:
            if replaces:
                with suppress(OSError):  # otherwise the next start does it
                    replaced.rename(target)
            raise
    try:
        (target / run_dir.latest_checkpoint.name).replace(run_dir.latest_checkpoint)
        sync_names(run_dir.checkpoints)
        shutil.rmtree(replaced, ignore_errors=True)
        _prune(run_dir, manifest, config)
    except OSError as error:
        logger.warning(
            "the checkpoint of step %d is published, but superseded ones could not be deleted: %s", manifest.step, error
        )


def pass_over(run_dir: RunDir, steps: Sequence[int], resumed: int) -> None:
    """Give up the checkpoints of these steps, newer than `resumed`, for good: the line of training continues from
    there. Otherwise a later start that can read one would resume from it, with a record of another line.

    They stay under another name until a new checkpoint is published. Raises OSError.
    """
    write_atomic(run_dir.latest_checkpoint, run_dir.checkpoint(resumed).name + "\n")
    for step in sorted(steps, reverse=True):
        aside = run_dir.passed_over_checkpoint(step)
        if aside.exists():
            discard(aside)  # of an earlier start, which could not be deleted when it was superseded
        until_written(aside, partial(run_dir.checkpoint(step).rename, aside))
        logger.warning("checkpoint of step %d: kept as %s until the next one is saved", step, aside.name)
    sync_names(run_dir.checkpoints)


def discard(folder: Path) -> None:
    """Delete a checkpoint without ever showing a half-deleted one as published. What cannot be deleted becomes debris
    for the next start."""
    debris = folder if folder.suffix == ".tmp" else folder.with_name(folder.name + ".tmp")
    with suppress(OSError):
        folder.rename(debris)
    shutil.rmtree(debris, ignore_errors=True)


def clean_up(run_dir: RunDir) -> None:
    """Delete what a crash left behind. Only the owner of the run directory may call it, before any rank saves. Debris
    that cannot be deleted, because some process still writes there, is left to the next start."""
    run_dir.checkpoints.mkdir(parents=True, exist_ok=True)
    left = sorted(run_dir.checkpoints.iterdir())
    for replaced in (path for path in left if _OLD.fullmatch(path.name)):
        # A crash between the two renames of `publish`: the old checkpoint is still that of its step.
        target = replaced.with_name(replaced.name.removeprefix(".").removesuffix(OLD))
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(target)
    for debris in (path for path in left if _DEBRIS.fullmatch(path.name)):
        shutil.rmtree(debris, ignore_errors=True)


def _replaced_by(target: Path) -> Path:
    return target.with_name(f".{target.name}{OLD}")


def _prune(run_dir: RunDir, newest: Manifest, config: SaveConfig) -> None:
    """Delete what the just published `newest` supersedes: in its line of training, all but the newest `keep` good
    checkpoints, those that stay for good, the best one, and that of an evaluation that is not recorded yet; and all
    that are newer than its parent, or were passed over when the run resumed from that.

    On a network file system a check may fail for a moment. So no check makes a checkpoint deleted; a failed one only
    does not count among the kept. The newest is not checked.
    """
    for step in run_dir.passed_over_steps():
        discard(run_dir.passed_over_checkpoint(step))
    before = newest.step if newest.parent is None else newest.parent
    kept, best = 1, (newest.meta.get("best") or {}).get("step")
    for step in run_dir.checkpoint_steps():
        if step == newest.step:
            continue
        folder = run_dir.checkpoint(step)
        stays = config.stays(step) or step in (best, newest.meta.get("evaluating"))
        if step > before or (kept >= config.keep and not stays):
            discard(folder)
        elif find_defect(folder) is None:
            kept += 1


def sync_names(folder: Path) -> None:
    """Make the names in `folder` durable, as fsync of a file does for its content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
