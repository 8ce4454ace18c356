"""A new run that begins as a checkpoint of another one: weights, optimizer, step and place in the prompt stream."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import BadInput, Unsure
from launcher.job.run_directory import clear, opened, run_directory, run_name
from launcher.recipe.changes import Change, changes
from launcher.recipe.load import Recipe, load_recipe, read_resolved
from launcher.runs.find import find
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir
from megatron_rl.run_dir import read_json_lines, write_json

FIXED = ("model.", "tokenizer.")
"""Keys below these describe the weights that the checkpoint holds."""


@dataclass(frozen=True, slots=True)
class Fork:
    """What a fork would be."""

    source: RunDir
    step: int
    recipe: Recipe
    changes: tuple[Change, ...]
    """Between the source's recipe and this one."""

    @property
    def told(self) -> dict[str, Any]:
        """For fork.json and `--json`."""
        changes = {one.key: [one.old, one.new] for one in self.changes}
        return {"from": str(self.source.root.absolute()), "step": self.step, "changes": changes}


def plan_fork(run_at_step: str, overrides: Sequence[str]) -> Fork:
    """
    Args:
        run_at_step: `RUN@STEP`, or RUN for its newest checkpoint.

    Raises:
        BadInput: there is no such run or checkpoint, or it does not fit these values.
    """
    name, at, number = run_at_step.rpartition("@")
    if at and not number.isdigit():
        raise BadInput(f"{run_at_step}: expected RUN@STEP with the number of a step, such as {name}@400")
    source = find(name if at else run_at_step)
    step = checkpoint_of(source, int(number) if at else None)
    recipe = load_recipe(str(source.resolved), overrides)
    changed = changes(read_resolved(source.resolved), recipe.config)
    refuse_misfits(changed, step, recipe.config.training.steps)
    return Fork(source, step, recipe, tuple(changed))


@contextmanager
def forked(fork: Fork, given: Path | None) -> Iterator[RunDir]:
    """Make the run; where the caller is refused to start it, it is removed again.

    Args:
        given: its directory; None: a new one beside that of the source.

    Raises:
        BadInput: there is a run already.
    """
    theirs = given is not None and given.exists()
    name = run_name(fork.recipe.config.name, time.localtime())
    with run_directory(given, name, fork.source.root.absolute().parent) as root:
        with opened(fork.recipe, root.absolute(), False) as found:
            if found.run.checkpoints.exists():
                raise BadInput(f"{root}: holds a run already; give a new directory")
            fill(fork, found.run)
        try:
            yield found.run
        except Unsure:
            raise
        except BadInput:  # nothing has started in it
            clear(root)
            if not theirs:
                root.rmdir()
            raise


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


def refuse_misfits(changed: Sequence[Change], step: int, steps: int) -> None:
    """Raises BadInput for a change that the checkpoint cannot follow."""
    problems = [f"{one}: the weights of the checkpoint fix it" for one in changed if one.key.startswith(FIXED)]
    if steps <= step:
        problems.append(f"training.steps {steps}: the checkpoint is of step {step} already; give more")
    if problems:
        raise BadInput(problems)


def fill(fork: Fork, target: RunDir) -> None:
    """Put into the prepared `target` what a run that has reached `step` has.

    Files that are never written again are shared by hard links, so a fork of 500 GB takes no space of its own; where
    the two are on different file systems they are copied.
    """
    source, step = fork.source, fork.step
    target.checkpoints.mkdir(parents=True)
    shutil.copytree(source.checkpoint(step), target.checkpoint(step), copy_function=_link)
    write_atomic(target.latest_checkpoint, target.checkpoint(step).name + "\n")
    if source.code.exists():  # only what is on record differs between the two
        snapshot = Path(os.path.realpath(source.code))
        shutil.copytree(snapshot, target.root / snapshot.name, copy_function=_link, symlinks=True)
        target.code.symlink_to(snapshot.name)
    for name in ("metrics", "evaluations"):
        _copy_rows(getattr(source, name), getattr(target, name), step)
    write_json(target.fork, {**fork.told, "at": time.time(), "by": os.environ.get("USER", "")})


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
