"""A new run that begins from a checkpoint of another one: weights, optimizer, step and position in the prompt
stream."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import BadInput, Unsure
from launcher.job.directories import clear, disk_errors, run_directory, run_name
from launcher.job.run_directory import opened
from launcher.recipe.changes import Change, as_json, changes
from launcher.recipe.load import Recipe, load_recipe, read_resolved
from launcher.runs.find import find, names_run
from launcher.runs.owner import refuse_others
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.manifest import CheckpointError, read_manifest
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, encode_line, read_lines, write
from megatron_rl.contract.run_records import Fork

FIXED = ("model.", "tokenizer.")


@dataclass(frozen=True, slots=True)
class PlannedFork:
    source: RunDir
    step: int
    recipe: Recipe
    changes: tuple[Change, ...]

    def record(self, at: float) -> Fork:
        source, by = str(self.source.root.absolute()), os.environ.get("USER", "")
        return Fork(source, self.step, as_json(self.changes), at, by)


def plan_fork(run_at_step: str, overrides: Sequence[str], trusted: bool) -> PlannedFork:
    """Plan a fork. Raises BadInput: there is no such run or checkpoint, or it does not fit these values.

    Args:
        run_at_step: `RUN@STEP`, or RUN for its newest checkpoint.
        trusted: whether it may be a run of another user.
    """
    source, step = checkpoint_named(run_at_step, trusted)
    recipe = load_recipe(str(source.resolved), overrides, trusted=True)  # see checkpoint_named
    changed = changes(read_resolved(source.resolved), recipe.config)
    refuse_misfits(changed, step, recipe.config.training.steps)
    return PlannedFork(source, step, recipe, tuple(changed))


@contextmanager
def forked(fork: PlannedFork, given: Path | None, keeps_code: bool = False) -> Iterator[RunDir]:
    """Make the run; it is removed again where the caller fails to start it. Raises BadInput: the directory holds a run
    already, or the code that it is to run does not know a key.

    Args:
        given: its directory; None: a new one beside the source's.
        keeps_code: whether it starts with the source's snapshot of the code, if there is one.
    """
    found_there = given is not None and given.exists()
    name = run_name(fork.recipe.config.name, time.localtime())
    if found_there and RunDir(str(given)).resolved.exists():
        raise BadInput(f"{given}: holds a run already; give a new directory")
    with run_directory(given, name, fork.source.root.absolute().parent) as root:
        gone = "the checkpoint may have been removed meanwhile (save.keep), or the disk be full"
        code_of = fork.source if keeps_code else None
        opening = opened(fork.recipe, root.absolute(), False, source=fork.source, code_of=code_of)
        with opening as found, disk_errors(root, gone):
            fill(fork, found.run)
        try:
            yield found.run
        except Unsure:
            raise
        except BadInput:  # nothing has started in it
            clear(root)
            if not found_there:
                root.rmdir()
            raise


def checkpoint_named(run_at_step: str, trusted: bool) -> tuple[RunDir, int]:
    """Return the run and the step of a checkpoint. Arguments and errors as of `plan_fork`."""
    name, at, number = run_at_step.rpartition("@")
    if at and names_run(run_at_step):
        name, at = run_at_step, ""
    if at and not re.fullmatch(r"[0-9]{1,12}", number):
        raise BadInput(f"{run_at_step}: expected RUN@STEP with the number of a step, such as {name}@400")
    run = find(name if at else run_at_step)
    refuse_others(run, trusted)
    return run, checkpoint_of(run, int(number) if at else None)


def checkpoint_of(run: RunDir, step: int | None) -> int:
    """Step to fork from; None means the newest. Raises BadInput where there is no such checkpoint."""
    with disk_errors(run.checkpoints, "the checkpoints of that run cannot be listed"):
        steps = run.checkpoint_steps()
    if not steps:
        raise BadInput(f"{run.root}: has no checkpoint yet")
    if step is None:
        return steps[0]
    if step not in steps:
        known = ", ".join(map(str, sorted(steps)))
        raise BadInput(f"{run.root}: has no checkpoint of step {step}; there are {known} (save.keep keeps the newest)")
    return step


def refuse_misfits(changed: Sequence[Change], step: int, steps: int) -> None:
    problems = [f"{one}: the weights of the checkpoint fix it" for one in changed if one.key.startswith(FIXED)]
    if steps <= step:
        problems.append(f"training.steps {steps}: the checkpoint is at step {step} already; give more")
    if problems:
        raise BadInput(problems)


def fill(fork: PlannedFork, target: RunDir) -> None:
    """Fill the prepared `target` with the files of a run that has reached `step`.

    Files that are never written again are hard links, so a fork of 500 GB takes no space; on another file system they
    are copied.
    """
    source, step = fork.source, fork.step
    shutil.copytree(source.checkpoint(step), target.checkpoint(step), copy_function=_link)
    write_atomic(target.latest_checkpoint, target.checkpoint(step).name + "\n")
    if source.code.exists():
        snapshot = Path(os.path.realpath(source.code))
        shutil.copytree(snapshot, target.root / snapshot.name, copy_function=_link, symlinks=True)
        target.code.symlink_to(snapshot.name)
    _copy_lines(source.metrics, target.metrics, step)
    evaluated = _copy_lines(source.evaluations, target.evaluations, step)
    begun = _evaluating(source, step)  # the fork repeats an evaluation that the source has not recorded
    if begun is not None and begun not in (step, *evaluated) and source.checkpoint(begun).is_dir():
        shutil.copytree(source.checkpoint(begun), target.checkpoint(begun), copy_function=_link)
    write(target.fork, fork.record(time.time()))


def _evaluating(source: RunDir, step: int) -> int | None:
    """Return the step whose evaluation went on beside training when this checkpoint was written; None without one."""
    try:
        return read_manifest(source.checkpoint(step)).meta.get("evaluating")
    except (CheckpointError, OSError):  # the ranks say what is wrong with it
        return None


def _copy_lines(source: Path, target: Path, step: int) -> list[int]:
    """Copy the lines up to a step, and return their steps. A line that a crash tore is omitted: its step is
    repeated."""
    found = read_lines(MetricsLine, source)
    if isinstance(found, Unreadable):
        raise BadInput(str(found))
    lines = [line for line in found.records if line.step <= step]
    write_atomic(target, "".join(encode_line(line) + "\n" for line in lines))
    return [line.step for line in lines]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copy2(source, target)
