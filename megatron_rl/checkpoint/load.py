"""Loading a published checkpoint into the layout of this run, whatever layout wrote it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.checkpoint.publish import CheckpointError, Damaged, Manifest, find_corruption, read_manifest
from megatron_rl.checkpoint.saving_ranks import LoadOnce
from megatron_rl.contract.attempt_records import LEDGER, AttemptEnd, MetricsLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, read_lines

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""For a ledger or metrics that cannot be read: a stale mount."""
LOOK_AGAIN_S = 1.0
"""Between two looks at a checkpoint that seems damaged."""
SAVED_METRIC = "time/save_s"
"""In the line of the step after a checkpoint was published."""


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint whose every byte was found to be what was written. Made by `verify` only."""

    folder: Path
    manifest: Manifest


def published_steps(run_dir: RunDir, control: dist.ProcessGroup) -> list[int]:
    """Steps that have a published checkpoint, newest first, as rank 0 sees them. Collective over all ranks.

    Raises CheckpointError where there is none though the record of the run knows of one.
    """
    found: list[list[int] | str | None] = [None]
    if dist.get_rank() == 0:
        steps = run_dir.checkpoint_steps()
        evidence = None if steps else evidence_of_a_checkpoint(run_dir)
        found = [steps if evidence is None else evidence]
    dist.broadcast_object_list(found, src=0, group=control)  # the ranks' caches of a network file system may differ
    if not isinstance(found[0], list):
        record = ", ".join(path.name for path in (run_dir.attempts_ledger, run_dir.metrics, run_dir.evaluations))
        raise CheckpointError(
            f"{run_dir.checkpoints} holds no checkpoint, and {found[0]}: this run does not begin again by itself. "
            "Bring the folder back (is its file system mounted?), or start another run; to begin this one anew, and "
            f"lose its record, delete {record}"
        )
    return found[0]


def evidence_of_a_checkpoint(run_dir: RunDir) -> str | None:
    """What the ledger or the metrics say of a checkpoint that was published; None where they know of none."""
    ledger = read_lines(LEDGER, run_dir.attempts_ledger, PATIENCE_S)
    metrics = read_lines(MetricsLine, run_dir.metrics, PATIENCE_S)
    for lines in (ledger, metrics):
        if isinstance(lines, Unreadable):
            return str(lines)
    assert not isinstance(ledger, Unreadable)
    assert not isinstance(metrics, Unreadable)
    saved = max((line.checkpoint for line in ledger.records if isinstance(line, AttemptEnd)), default=0)
    if saved:
        return f"{run_dir.attempts_ledger.name} knows of one of step {saved}"
    published = [line.step for line in metrics.records if SAVED_METRIC in line.values]
    return f"{run_dir.metrics.name} knows of one published before step {published[-1]}" if published else None


def restore_newest(
    run_dir: RunDir, steps: Sequence[int], restore: Callable[[VerifiedCheckpoint], None], control: dist.ProcessGroup
) -> VerifiedCheckpoint | None:
    """Restore the run from the newest good one of its checkpoints. Collective over all ranks.

    One that is damaged, on whichever rank this shows, is passed over by all, and rank 0 says so. It stays on the disk
    until a new checkpoint is published: what could not be read here may be readable on another node.

    Args:
        steps: of the checkpoints, newest first; the same on every rank.
        restore: loads it, with `read`; not called for one that is damaged.

    Returns:
        The one that was restored; None where the run has none yet.

    Raises:
        CheckpointError: there are some and none of them is good: to begin again from nothing is not for us to
            decide. Or one is good and does not fit this model, as all others will not.
    """
    passed_over = []
    for step in steps:
        try:
            checkpoint = verify(run_dir.checkpoint(step), control)
            restore(checkpoint)
        except Damaged as error:
            passed_over.append(f"step {step}: {error}")
            if dist.get_rank() == 0:
                logger.warning("checkpoint of step %d passed over: %s", step, error)
        else:
            return checkpoint
    if passed_over:
        raise CheckpointError(
            f"no checkpoint in {run_dir.checkpoints} is good: {'; '.join(passed_over)}. Bring one back from a backup, "
            "or start another run: this one does not begin again by itself"
        )
    return None


def verify(folder: Path, control: dist.ProcessGroup) -> VerifiedCheckpoint:
    """Read and hash all files of a checkpoint, each rank its share of them. Collective over all ranks.

    So every byte is read twice, here and by `read`. Hashing while loading would save that only if each rank read whole
    files: in another layout it reads pieces of many. And a damaged one would be half loaded before it is found.

    Raises:
        Damaged: a file is missing, cut short, unreadable or not what was written; the same on every rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    manifest = _agree_on_manifest(folder, control)
    share = sorted(manifest.files)[rank::world_size]
    problems: list[str | None] = [None] * world_size
    mine = _look_twice(lambda: find_corruption(folder, {name: manifest.files[name] for name in share}))
    dist.all_gather_object(problems, mine, group=control)
    if found := sorted(set(filter(None, problems))):
        raise Damaged("; ".join(found))
    return VerifiedCheckpoint(folder, manifest)


def read(
    checkpoint: VerifiedCheckpoint,
    sharded_state: dict[str, Any],
    data: dist.ProcessGroup,
    expert_data: dist.ProcessGroup | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and meta of the checkpoint. Collective over all ranks.

    Args:
        sharded_state: megatron-core's sharded state dict of the model (and optimizer) as it is now; says which part of
            which tensor this rank wants, and whether it reads it or is sent it. Tensors in it are overwritten.
        data: the data-parallel ranks, which hold the same part of the model.
        expert_data: those with the same experts, where not all of them are.

    Returns:
        (state dict for `load_state_dict`, the meta given to `save`).

    Raises:
        CheckpointError: it is of another model.
        Damaged: it has become unreadable since it was verified; the tensors may be half overwritten.
    """
    try:
        state = dist_checkpointing.load(sharded_state, str(checkpoint.folder), LoadOnce(data, expert_data or data))
    # torch wraps what goes wrong on any rank into CheckpointException, which is no Exception.
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        if all(isinstance(cause, OSError) for cause in causes):
            raise Damaged(f"{checkpoint.folder} cannot be read: {causes[0]}") from error
        raise CheckpointError(f"{checkpoint.folder} does not fit this model: {error}") from error
    except (CheckpointingException, KeyError) as error:
        raise CheckpointError(f"{checkpoint.folder} does not fit this model: {error}") from error
    return state, checkpoint.manifest.meta


def _look_twice(look: Callable[[], str | None]) -> str | None:
    """What is wrong, if it still is at the second look: a checkpoint that is passed over is given up by the next one,
    and the first look at a network file system may fail, or show what was there before."""
    if look() is None:
        return None
    time.sleep(LOOK_AGAIN_S)
    return look()


def _try_manifest(folder: Path, found: list[Manifest | str | None]) -> str | None:
    """Put the manifest, or what is wrong with it, into `found`; what is wrong."""
    try:
        found[:] = [read_manifest(folder)]
    except Damaged as error:
        found[:] = [str(error)]
        return str(error)
    return None


def _agree_on_manifest(folder: Path, control: dist.ProcessGroup) -> Manifest:
    """The manifest as rank 0 reads it."""
    found: list[Manifest | str | None] = [None]
    if dist.get_rank() == 0:
        _look_twice(lambda: _try_manifest(folder, found))
    dist.broadcast_object_list(found, src=0, group=control)
    if not isinstance(found[0], Manifest):
        raise Damaged(str(found[0]))
    return found[0]
