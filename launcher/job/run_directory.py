"""The run directory before an attempt: make it, or check that the run in it is the one that is asked for."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import BadInput
from launcher.host.process.lock import RunIsOwned, RunLock
from launcher.host.record.identity import identify
from launcher.host.record.reading import UnreadableRecord
from launcher.job.directories import PRIVATE, clear, disk_errors, made
from launcher.recipe.changes import CHANGEABLE, Change, as_json, changes
from launcher.recipe.load import Recipe, asked_text, dump_resolved, read_resolved
from launcher.recipe.located_yaml import read_text
from megatron_rl.config import RunConfig
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import ABSENT, Unreadable, append
from megatron_rl.contract.run_records import RecipeChange


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run directory in which an attempt can start."""

    run: RunDir
    attempt: Attempt | None
    """The attempt to start; None: the run is finished and there is nothing to do."""
    changes: tuple[Change, ...]
    """What `--change` altered."""


@dataclass(slots=True)
class Opened:
    """A run directory that is ours for the moment, with what was asked for written into it."""

    run: RunDir
    finished: bool
    """There is nothing to do."""
    changes: tuple[Change, ...]
    """What `change` altered."""
    run_id: str = ""
    handed_over: bool = False
    """Set once somebody else may use the directory: from then on a failure leaves it as it is."""


def prepare(recipe: Recipe, root: Path, change: bool) -> Prepared:
    """Write what was asked into `root` and open the next attempt there, or find the run finished.

    Raises:
        BadInput: the directory is in use, foreign or unwritable, or its run was asked for with other values.
    """
    with opened(recipe, root, change) as found:
        run = found.run
        if found.finished:
            return Prepared(run, None, ())
        attempt = run.attempt(run.last_attempt() + 1)
        attempt.folder.mkdir(parents=True)
        attempt.logs.mkdir(parents=True, exist_ok=True)
        return Prepared(run, attempt, found.changes)


@contextmanager
def opened(recipe: Recipe, root: Path, change: bool, my_job: str | None = None) -> Iterator[Opened]:
    """Hold `root` with what was asked for written into it; when the caller fails, everything is as it was before,
    unless it has set `handed_over`.

    Args:
        my_job: the Slurm job that this process is in, which may own the run.

    Raises:
        BadInput: the directory is in use, foreign or unwritable, or its run was asked for with other values.
    """
    run = RunDir(root)
    _refuse_foreign(run)
    with disk_errors(root), made(root, PRIVATE), _locked(run):
        found = Opened(run, False, ())
        with _put_back_on_failure(found):
            _refuse_owned(run, my_job)
            altered: list[Change] = []
            if run.resolved.exists():
                altered = _accept_changes(run, recipe.config, change)
            found.finished = run.done.exists() and not altered
            found.changes = tuple(altered)
            found.run_id = _run_id(run)
            if not found.finished:
                if altered:
                    _record_changes(run, altered, run.last_attempt() + 1)
                _write_recipe(run, recipe)
            yield found


@contextmanager
def _put_back_on_failure(found: Opened) -> Iterator[None]:
    run = found.run
    files = (run.recipe, run.resolved, run.plan, run.script, run.changes, run.done, run.identity, run.job, run.wandb)
    before = {path: read_text(path) if path.exists() else None for path in files}
    there = {path.name for path in run.root.iterdir()}
    code = _snapshot_of(run)
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        if succeeded or found.handed_over:
            pass
        elif there == {run.lock.name}:
            clear(run.root)
        else:
            _put_code_back(run, code, there)
            for path, text in before.items():
                if text is None:
                    path.unlink(missing_ok=True)
                else:
                    write_atomic(path, text)


def _snapshot_of(run: RunDir) -> Path | None:
    """What the link to the run's code says."""
    return run.code.readlink() if run.code.is_symlink() else None


def _put_code_back(run: RunDir, before: Path | None, there: set[str]) -> None:
    """Have the run's code lead to the snapshot of before, and remove the one that was taken since."""
    fresh = _snapshot_of(run)
    if fresh is None or fresh == before:
        return
    if before is None:
        run.code.unlink()
    else:
        link = run.code.with_name(f".{run.code.name}.{os.getpid()}")
        link.symlink_to(before)
        link.replace(run.code)
    if str(fresh) not in there:
        shutil.rmtree(run.root / fresh, ignore_errors=True)


def check(recipe: Recipe, root: Path, change: bool) -> list[Change]:
    """The changes that `prepare` would make, for a dry run. Touches nothing. Raises BadInput as `prepare` does."""
    run = RunDir(root)
    _refuse_foreign(run)
    with disk_errors(root):
        # The templates slurm/*.sbatch ask for their own script from inside the job that owns the run.
        _refuse_owned(run, os.environ.get("SLURM_JOB_ID"))
        return _accept_changes(run, recipe.config, change) if run.resolved.exists() else []


def _refuse_foreign(run: RunDir) -> None:
    with disk_errors(run.root):
        if run.root.exists() and not run.root.is_dir():
            raise BadInput(f"{run.root}: is a file, not a directory")
        ours = any(path.exists() for path in (run.lock, run.resolved, run.job, run.identity))
        if run.root.is_dir() and any(run.root.iterdir()) and not ours:
            raise BadInput(f"{run.root}: is not empty and not a run directory; give a new or an empty one")


def _refuse_owned(run: RunDir, my_job: str | None) -> None:
    """A run belongs to the Slurm job that it was submitted as, until Slurm itself says that the job has ended."""
    if not run.job.exists():
        return
    from launcher.backends.slurm.jobs import read_owners  # a new run asks nobody
    from launcher.runs.state import Copy, has_left, last_line, recorded_owner

    owner = recorded_owner(run)
    if isinstance(owner, Unreadable):
        raise BadInput(f"{owner}: which job owns the run cannot be told; remove the file if none does (squeue --me)")
    if isinstance(owner, Copy) or owner is ABSENT or owner.job_id == my_job:
        return
    (job,) = read_owners([owner])
    if has_left(job, last_line(run)):
        return
    if job.kind == "unknown":
        raise BadInput(f"{run.root}: belongs to job {job.job_id}, and Slurm cannot be asked about it: {job.reason}")
    if job.owns:
        nodes = f" on {job.nodes}" if job.nodes else ""
        what = f"see it with mrl status {run.root.name}, end it with mrl cancel --drain {run.root.name}"
        if job.word == "COMPLETING":
            what = "Slurm is ending what is left of it there; try again in a moment"
        raise BadInput(f"{run.root}: belongs to job {job.job_id}, which is {job.word.lower()}{nodes}; {what}")


def _run_id(run: RunDir) -> str:
    try:
        return identify(run).id
    except UnreadableRecord as error:
        raise BadInput(f"{error}: which run this is cannot be told; remove the file if it is no copy") from error


def _accept_changes(run: RunDir, config: RunConfig, change: bool) -> list[Change]:
    found = changes(read_resolved(run.resolved), config)
    if not change:
        _refuse(run, found, "go on with the values of before, or give --change")
    refused = [one for one in found if not one.allowed]
    _refuse(run, refused, f"a run that has begun can change only {', '.join(CHANGEABLE)}; start a new one instead")
    reached = max(run.checkpoint_steps(), default=0)
    if found and config.training.steps < reached:
        raise BadInput(
            f"{run.root}: training.steps {config.training.steps}: the run has already reached step {reached}"
        )
    return found


def _refuse(run: RunDir, found: Sequence[Change], advice: str) -> None:
    if found:
        raise BadInput([f"{run.root}: this run has other values: {one}" for one in found] + [advice])


def _record_changes(run: RunDir, altered: Sequence[Change], attempt: int) -> None:
    from getpass import getuser  # seldom needed, and slow to import

    append(run.changes, RecipeChange(attempt, as_json(altered), time.time(), getuser()))
    if any(one.key == "training.steps" for one in altered):
        run.done.unlink(missing_ok=True)  # before resolved.yaml: DONE must never be seen with steps still to do


def _write_recipe(run: RunDir, recipe: Recipe) -> None:
    if not run.recipe.exists():
        write_atomic(run.recipe, asked_text(recipe))
    write_atomic(run.resolved, dump_resolved(recipe.config))


@contextmanager
def _locked(run: RunDir) -> Iterator[None]:
    try:
        lock = RunLock(run.lock, "mrl-submit, which is preparing it", patience=1.0)
    except RunIsOwned as error:
        raise BadInput(f"{run.root}: {error}") from error
    try:
        yield
    finally:
        lock.release()
