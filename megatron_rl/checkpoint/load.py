"""Loading a published checkpoint into the layout of this run, whatever layout wrote it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.checkpoint.publish import CheckpointError, Damaged, Manifest, find_corruption, read_manifest
from megatron_rl.contract.paths import RunDir

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verified:
    """A checkpoint whose every byte was found to be what was written. Made by `verify` only."""

    folder: Path
    manifest: Manifest


def restore_newest(run_dir: RunDir, restore: Callable[[Verified], None]) -> Verified | None:
    """Restore the run from its newest good checkpoint. Collective over all ranks.

    One that is damaged, on whichever rank this shows, is passed over by all, and rank 0 says so. It stays on the disk
    until a new checkpoint is published: what could not be read here may be readable on another node.

    Args:
        restore: loads it, with `read`; not called for one that is damaged.

    Returns:
        The one that was restored; None where the run has none yet.

    Raises:
        CheckpointError: there are some and none of them is good: to begin again from nothing is not for us to
            decide. Or one is good and does not fit this model, as all others will not.
    """
    found: list[list[int]] = [run_dir.checkpoint_steps() if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(found, src=0)  # the ranks' caches of a network file system may differ
    passed_over = []
    for step in found[0]:
        try:
            checkpoint = verify(run_dir.checkpoint(step))
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


def load(folder: Path, sharded_state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`verify` and `read` in one."""
    return read(verify(folder), sharded_state)


def verify(folder: Path) -> Verified:
    """Read and hash all files of a checkpoint, each rank its share of them. Collective over all ranks.

    So every byte is read twice, here and by `read`. Hashing while loading would save that only if each rank read whole
    files: in another layout it reads pieces of many. And a damaged one would be half loaded before it is found.

    Raises:
        Damaged: a file is missing, cut short, unreadable or not what was written; the same on every rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    manifest = _agree_on_manifest(folder)
    share = sorted(manifest.files)[rank::world_size]
    problems: list[str | None] = [None] * world_size
    dist.all_gather_object(problems, find_corruption(folder, {name: manifest.files[name] for name in share}))
    if found := sorted(set(filter(None, problems))):
        raise Damaged("; ".join(found))
    return Verified(folder, manifest)


def read(checkpoint: Verified, sharded_state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and meta of the checkpoint. Collective over all ranks.

    sharded_state: megatron-core's sharded state dict of the model (and optimizer) as it is now; says which part of
    which tensor this rank wants. Tensors in it are overwritten.
    Returns (state dict for `load_state_dict`, the meta given to `save`).

    Raises:
        CheckpointError: it is of another model.
        Damaged: it has become unreadable since it was verified; the tensors may be half overwritten.
    """
    try:
        state = dist_checkpointing.load(sharded_state, str(checkpoint.folder))
    # torch wraps what goes wrong on any rank into CheckpointException, which is no Exception.
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        if all(isinstance(cause, OSError) for cause in causes):
            raise Damaged(f"{checkpoint.folder} cannot be read: {causes[0]}") from error
        raise CheckpointError(f"{checkpoint.folder} does not fit this model: {error}") from error
    except (CheckpointingException, KeyError) as error:
        raise CheckpointError(f"{checkpoint.folder} does not fit this model: {error}") from error
    return state, checkpoint.manifest.meta


def _agree_on_manifest(folder: Path) -> Manifest:
    """The manifest as rank 0 reads it."""
    said: list[Manifest | str | None] = [None]
    if dist.get_rank() == 0:
        try:
            said = [read_manifest(folder)]
        except Damaged as error:
            said = [str(error)]
    dist.broadcast_object_list(said, src=0)
    if not isinstance(said[0], Manifest):
        raise Damaged(str(said[0]))
    return said[0]
