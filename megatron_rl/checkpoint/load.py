"""Loading a published checkpoint into the layout of this run, whatever layout wrote it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from megatron_rl.contract.attempt_records import LEDGER, AttemptEnd, MetricsLine
from megatron_rl.contract.manifest import (
    CheckpointError,
    Damaged,
    Manifest,
    find_corruption,
    found_twice,
    read_manifest,
)
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, read_lines
from megatron_rl.model.policy import Policy
from megatron_rl.model.trainable import load_part
from megatron_rl.rank.control import Control

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0  # seconds to retry a ledger or metrics that cannot be read, for example on a stale mount
SAVED_METRIC = "time/save_s"  # metric in the line of the step after a checkpoint was published


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint whose every byte was verified. Only `verify` creates it."""

    folder: Path
    manifest: Manifest


def published_steps(run_dir: RunDir, control: Control) -> list[int]:
    """Steps of published checkpoints, newest first, as rank 0 sees them. Collective over all ranks.

    Raises CheckpointError if there are none although the record of the run mentions one.
    """
    found: list[int] | str = []
    if control.rank == 0:
        steps = run_dir.checkpoint_steps()
        evidence = None if steps else evidence_of_a_checkpoint(run_dir)
        found = steps if evidence is None else evidence
    found = control.share(found)  # the ranks' caches of a network file system may differ
    if not isinstance(found, list):
        record = ", ".join(path.name for path in (run_dir.attempts_ledger, run_dir.metrics, run_dir.evaluations))
        raise CheckpointError(
            f"{run_dir.checkpoints} holds no checkpoint, but {found}: this run does not start over by itself. "
            "Restore the folder (is its file system mounted?), or start another run. To start this one over and lose "
            f"its record, delete {record}"
        )
    return found


def evidence_of_a_checkpoint(run_dir: RunDir) -> str | None:
    """Evidence of a published checkpoint in the ledger or the metrics; None without any."""
    ledger = read_lines(LEDGER, run_dir.attempts_ledger, PATIENCE_S)
    if isinstance(ledger, Unreadable):
        return str(ledger)
    metrics = read_lines(MetricsLine, run_dir.metrics, PATIENCE_S)
    if isinstance(metrics, Unreadable):
        return str(metrics)
    saved = max((line.checkpoint for line in ledger.records if isinstance(line, AttemptEnd)), default=0)
    if saved:
        return f"{run_dir.attempts_ledger.name} mentions one of step {saved}"
    published = [line.step for line in metrics.records if SAVED_METRIC in line.values]
    return f"{run_dir.metrics.name} mentions one published before step {published[-1]}" if published else None


def restore_newest(
    run_dir: RunDir, steps: Sequence[int], restore: Callable[[VerifiedCheckpoint], None], control: Control
) -> VerifiedCheckpoint | None:
    """Restore the run from its newest good checkpoint. Collective over all ranks.

    All ranks skip a checkpoint that is damaged on any of them, and rank 0 logs it. Another start, on other nodes, may
    be able to read it, until this one continues: see `Checkpointer.pass_over_newer`.

    Args:
        steps: of the checkpoints, newest first; the same on every rank.
        restore: loads a checkpoint with `read`; not called for damaged ones.

    Returns:
        The restored checkpoint; None if the run has none.

    Raises:
        CheckpointError: all checkpoints are damaged: the user must decide whether to start over. Or the newest good one
            does not fit this model, so that no other will.
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
            f"no checkpoint in {run_dir.checkpoints} is good: {'; '.join(passed_over)}. Restore one from a backup, "
            "or start another run: this one does not start over by itself"
        )
    return None


def verify(folder: Path, control: Control) -> VerifiedCheckpoint:
    """Read and hash all files of a checkpoint, each rank its share of them. Collective over all ranks.

    So every byte is read twice, here and by `read`. Hashing while loading would avoid that only if each rank read whole
    files, but in another layout it reads parts of many. And a damaged checkpoint would be half loaded when it is found.

    Raises:
        Damaged: a file is missing, cut short, unreadable or has other content; the same on every rank.
    """
    manifest = _agree_on_manifest(folder, control)
    share = sorted(manifest.files)[control.rank :: control.size]
    mine = found_twice(lambda: find_corruption(folder, {name: manifest.files[name] for name in share}))
    if found := sorted(set(filter(None, control.gather(mine)))):
        raise Damaged("; ".join(found))
    return VerifiedCheckpoint(folder, manifest)


def read(
    checkpoint: VerifiedCheckpoint,
    sharded_state: dict[str, Any],
    data: dist.ProcessGroup,
    expert_data: dist.ProcessGroup | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read state and meta of the checkpoint. Collective over all ranks.

    Args:
        sharded_state: megatron-core's sharded state dict of the current model (and optimizer). It says which part of
            which tensor this rank needs, and whether it reads or receives it. Its tensors are overwritten.
        data: data-parallel ranks with the same part of the model.
        expert_data: data-parallel ranks with the same experts, if not all have the same.

    Returns:
        (state dict for `load_state_dict`, the meta given to `save`).

    Raises:
        CheckpointError: it belongs to another model, or its pickles name more than data.
        Damaged: it has become unreadable since its verification; tensors may be partly overwritten.
    """
    from megatron_rl.checkpoint.saving_ranks import LoadOnce  # slow to import, and a new run reads no checkpoint

    strategy = LoadOnce(data, expert_data or data)
    try:
        # Without megatron-core's check that every tensor is read once, for which each rank would gather the
        # descriptions of all tensors of all ranks: 2.4 GB at 16,384 ranks with 1,000 tensors each. The index of the
        # checkpoint was verified, and says what each tensor is.
        state = dist_checkpointing.load(
            sharded_state, str(checkpoint.folder), strategy, validate_access_integrity=False
        )
    except CheckpointingException as error:
        raise CheckpointError(f"{checkpoint.folder} does not fit this model: {error}") from error
    except UnpicklingError as error:
        from megatron_rl.checkpoint.plain_pickle import reason  # slow to import

        raise CheckpointError(f"{checkpoint.folder / COMMON_STATE_FNAME}: {reason(error)}") from error
    return state, checkpoint.manifest.meta


def read_weights(
    policy: Policy,
    checkpoint: VerifiedCheckpoint,
    part: Callable[[dict[str, Any]], dict[str, Any]],
    data: dist.ProcessGroup,
    expert_data: dist.ProcessGroup,
) -> None:
    """Load a part of a policy's weights, chosen from its sharded state, from a checkpoint. Collective over all ranks.
    Other arguments and errors as in `read`."""
    from megatron_rl.checkpoint.saving_ranks import sharded_weights

    weights = sharded_weights(policy, data, expert_data, part)
    load_part(policy, read(checkpoint, {"model": weights}, data, expert_data)[0]["model"])


def _agree_on_manifest(folder: Path, control: Control) -> Manifest:
    found: list[Manifest | CheckpointError] = []

    def check() -> str | None:
        try:
            found[:] = [read_manifest(folder)]
        except CheckpointError as error:
            found[:] = [error]
        return str(found[0]) if isinstance(found[0], Damaged) else None

    if control.rank == 0:
        found_twice(check)
    (manifest,) = control.share(found)
    if isinstance(manifest, CheckpointError):
        raise manifest
    return manifest
