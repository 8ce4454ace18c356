"""The run directory before an attempt: make it, or check that the run in it is the one that is asked for."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.changes import CHANGEABLE, Change, changes
from launcher.errors import BadInput
from launcher.host.lock import RunIsOwned, RunLock
from launcher.recipe import Recipe, asked_text, dump_resolved, read_resolved
from megatron_rl.config import RunConfig
from megatron_rl.run_dir import Attempt, RunDir, append_json_line, read_json, write_atomic

RUNS = "runs"
"""Where runs are made that were given no directory: below the current one, or below a cluster's run_root."""


@dataclass(frozen=True, slots=True)
class Prepared:
    run: RunDir
    attempt: Attempt | None
    """The attempt to start; None: the run is finished and there is nothing to do."""
    changes: tuple[Change, ...]
    """What `--change` altered."""


def run_name(name: str, now: time.struct_time) -> str:
    """NAME-DATE-TIME."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', now)}"


def new_run_dir(name: str, parent: Path) -> Path:
    """PARENT/NAME, or NAME-2 and so on: made, and never one that was there."""
    stem = parent / name
    with _disk_errors(stem):
        parent.mkdir(parents=True, exist_ok=True)
        for path in [stem, *(stem.with_name(f"{stem.name}-{number}") for number in range(2, 1000))]:
            try:
                path.mkdir()
                return path
            except FileExistsError:
                continue
    raise BadInput(f"{stem}: too many runs of this name were started at once; give a directory with --run-dir")


def prepare(recipe: Recipe, root: Path, change: bool) -> Prepared:
    """Write what was asked into `root` and open the next attempt there, or find the run finished.

    Raises:
        BadInput: the directory is in use, foreign or unwritable, or its run was asked for with other values.
    """
    with opened(recipe, root, change) as (run, finished, altered):
        if finished:
            return Prepared(run, None, ())
        attempt = run.attempt(run.last_attempt() + 1)
        attempt.folder.mkdir(parents=True)
        attempt.logs.mkdir(parents=True, exist_ok=True)
        return Prepared(run, attempt, altered)


@contextmanager
def opened(
    recipe: Recipe, root: Path, change: bool, my_job: str | None = None
) -> Iterator[tuple[RunDir, bool, tuple[Change, ...]]]:
    """Hold `root` with what was asked for written into it; when the caller fails, everything is as it was before.

    Args:
        my_job: the Slurm job that this process is in, which may own the run.

    Yields:
        The run; whether it is finished, so that there is nothing to do; what `change` altered.

    Raises:
        BadInput: the directory is in use, foreign or unwritable, or its run was asked for with other values.
    """
    run = RunDir(root)
    _refuse_foreign(run)
    with _disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        with _locked(run), _put_back_on_failure(run):
            _refuse_owned(run, my_job)
            altered: list[Change] = []
            if run.resolved.exists():
                altered = _accept_changes(run, recipe.config, change)
            finished = read_json(run.done) is not None and not altered
            if not finished:
                if altered:
                    _record_changes(run, altered, run.last_attempt() + 1)
                _write_recipe(run, recipe)
            yield run, finished, tuple(altered)


@contextmanager
def _put_back_on_failure(run: RunDir) -> Iterator[None]:
    files = (run.recipe, run.resolved, run.plan, run.script, run.changes, run.done)
    before = {path: path.read_text(encoding="utf-8") if path.exists() else None for path in files}
    fresh = [path.name for path in run.root.iterdir()] == [run.lock.name]
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        if not succeeded and fresh:
            shutil.rmtree(run.root, ignore_errors=True)
            if run.root.parent.name == RUNS:
                with suppress(OSError):  # other runs are in there
                    run.root.parent.rmdir()
        elif not succeeded:
            for path, text in before.items():
                if text is None:
                    path.unlink(missing_ok=True)
                else:
                    write_atomic(path, text)


def check(recipe: Recipe, root: Path, change: bool) -> list[Change]:
    """What `prepare` would refuse, without touching anything (for --dry-run); returns the changes."""
    run = RunDir(root)
    _refuse_foreign(run)
    # The templates slurm/*.sbatch ask for their own script from inside the job that owns the run.
    _refuse_owned(run, os.environ.get("SLURM_JOB_ID"))
    return _accept_changes(run, recipe.config, change) if run.resolved.exists() else []


def _refuse_foreign(run: RunDir) -> None:
    with _disk_errors(run.root):
        if run.root.exists() and not run.root.is_dir():
            raise BadInput(f"{run.root}: is a file, not a directory")
        if run.root.is_dir() and any(run.root.iterdir()) and not run.lock.exists() and not run.resolved.exists():
            raise BadInput(f"{run.root}: is not empty and not a run directory; give a new or an empty one")


def _refuse_owned(run: RunDir, my_job: str | None) -> None:
    """A run belongs to the Slurm job that it was submitted as, until Slurm itself says that the job has ended."""
    record = read_json(run.job)
    if record is None or record["job_id"] == my_job:
        return
    from launcher.backends.slurm_state import read_jobs  # a new run asks nobody

    job_id = record["job_id"]
    job = read_jobs([job_id])[job_id]
    if job.kind == "unknown":
        raise BadInput(f"{run.root}: belongs to job {job_id}, and Slurm cannot be asked about it: {job.reason}")
    if job.owns:
        nodes = f" on {job.nodes}" if job.nodes else ""
        raise BadInput(
            f"{run.root}: belongs to job {job_id}, which is {job.word.lower()}{nodes}; "
            f"see it with mrl status {run.root.name}, end it with mrl cancel --drain {run.root.name}"
        )


def _accept_changes(run: RunDir, config: RunConfig, change: bool) -> list[Change]:
    found = changes(read_resolved(run.resolved), config)
    if not change:
        _refuse(run, found, "go on with the values of before, or give --change")
    refused = [one for one in found if not one.allowed]
    _refuse(run, refused, f"a run that has begun can change only {', '.join(CHANGEABLE)}; start a new one instead")
    reached = _reached(run)
    if found and config.training.steps < reached:
        raise BadInput(
            f"{run.root}: training.steps {config.training.steps}: the run has already reached step {reached}"
        )
    return found


def _refuse(run: RunDir, found: Sequence[Change], advice: str) -> None:
    if found:
        raise BadInput([f"{run.root}: this run has other values: {one}" for one in found] + [advice])


def _reached(run: RunDir) -> int:
    if not run.latest_checkpoint.exists():
        return 0
    return int(run.latest_checkpoint.read_text(encoding="utf-8").strip().rpartition("-")[2])


def _record_changes(run: RunDir, altered: Sequence[Change], attempt: int) -> None:
    from getpass import getuser  # seldom needed, and slow to import

    line = {
        "at": time.time(),
        "by": getuser(),
        "attempt": attempt,
        "changes": {one.key: [one.old, one.new] for one in altered},
    }
    append_json_line(run.changes, line)
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


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInput(f"{error.filename or path}: {error.strerror}; give a writable --run-dir") from error
