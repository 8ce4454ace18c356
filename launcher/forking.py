"""A new run that begins as a checkpoint of another one: weights, optimizer, step and place in the prompt stream."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.changes import Change
from launcher.errors import BadInput
from megatron_rl.run_dir import RunDir, read_json_lines, write_atomic, write_json

FIXED = ("model.", "tokenizer.")
"""Keys below these describe the weights that the checkpoint holds."""


def checkpoint_of(run: RunDir, step: int | None) -> int:
    """The step to fork from; the newest where None.

    Raises:
        BadInput: there is no such checkpoint.
    """
    steps = run.checkpoint_steps()
    if not steps:
        raise BadInput(f"{run.root}: has no checkpoint yet")
    if step is None:
        return int(steps[0])
    if step not in steps:
        kept = ", ".join(map(str, sorted(steps)))
        raise BadInput(f"{run.root}: has no checkpoint of step {step}; there are {kept} (save.keep keeps the newest)")
    return step


def refuse_misfits(changes: Sequence[Change], step: int, steps: int) -> None:
    """Raises BadInput for a change that the checkpoint cannot follow."""
    problems = [f"{one}: the weights of the checkpoint fix it" for one in changes if one.key.startswith(FIXED)]
    if steps <= step:
        problems.append(f"training.steps {steps}: the checkpoint is of step {step} already; give more")
    if problems:
        raise BadInput(problems)


def fill(source: RunDir, step: int, target: RunDir, changes: Sequence[Change]) -> None:
    """Put into the prepared `target` what a run that has reached `step` has.

    Files that are never written again are shared by hard links, so a fork of 500 GB takes no space of its own; where
    the two are on different file systems they are copied.
    """
    target.checkpoints.mkdir(parents=True)
    shutil.copytree(source.checkpoint(step), target.checkpoint(step), copy_function=_link)
    write_atomic(target.latest_checkpoint, target.checkpoint(step).name + "\n")
    if source.code.exists():  # only what is on record differs between the two
        snapshot = Path(os.path.realpath(source.code))
        shutil.copytree(snapshot, target.root / snapshot.name, copy_function=_link, symlinks=True)
        target.code.symlink_to(snapshot.name)
    for name in ("metrics", "evaluations"):
        _copy_rows(getattr(source, name), getattr(target, name), step)
    write_json(
        target.fork,
        {
            "from": str(source.root.absolute()),
            "step": step,
            "at": time.time(),
            "by": os.environ.get("USER", ""),
            "changes": {one.key: [one.old, one.new] for one in changes},
        },
    )


def _copy_rows(source: Path, target: Path, step: int) -> None:
    rows = [row for row in read_json_lines(source) if row["step"] <= step]
    write_atomic(target, "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copy2(source, target)
