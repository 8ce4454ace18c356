"""Loading a published checkpoint into the layout of this run, whatever layout wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.checkpoint.publish import CheckpointError, find_corruption, find_defect, read_manifest


def load(folder: Path, sharded_state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and meta of the checkpoint in `folder`. Collective over all ranks.

    sharded_state: megatron-core's sharded state dict of the model (and optimizer) as it is now; says which part of
    which tensor this rank wants. Tensors in it are overwritten.
    Returns (state dict for `load_state_dict`, the meta given to `save`).

    Raises CheckpointError, the same on every rank, where a file is missing, cut short or not what was written
    (each rank reads and hashes its share of them), or where the checkpoint is of another model.
    """
    _verify(folder)
    try:
        state = dist_checkpointing.load(sharded_state, str(folder))
    # torch wraps what goes wrong on any rank into CheckpointException, which is no Exception.
    except (CheckpointException, CheckpointingException, KeyError) as error:
        raise CheckpointError(f"{folder} does not fit this model: {error}") from error
    return state, read_manifest(folder).meta


def _verify(folder: Path) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    problem = find_defect(folder)
    if problem is None:
        files = read_manifest(folder).files
        share = sorted(files)[rank::world_size]
        problem = find_corruption(folder, {name: files[name] for name in share})
    problems: list[str | None] = [None] * world_size
    dist.all_gather_object(problems, problem)
    found = sorted({found for found in problems if found})
    if found:
        raise CheckpointError(f"{'; '.join(found)}: resume from another checkpoint")
