"""The run directory before an attempt: make it, or check that the run in it is the one that is asked for."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import BadInput
from launcher.host.process.lock import RunIsOwned, RunLock
from launcher.recipe.changes import CHANGEABLE, Change, changes
from launcher.recipe.load import Recipe, asked_text, dump_resolved, read_resolved
from megatron_rl.config import RunConfig
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.run_dir import append_json_line, read_json, read_json_lines

RUNS = "runs"
"""Where local runs are made that were given no directory: below the current one."""


@dataclass(frozen=True, slots=True)
class Prepared:
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
    keep: bool = False
    """Set once somebody else may use the directory: from then on a failure leaves it as it is."""


def run_name(name: str, now: time.struct_time) -> str:
    """NAME-DATE-TIME."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', now)}"


@contextmanager
def run_directory(given: Path | None, name: str, parent: Path) -> Iterator[Path]:
    """The directory that a run was given; else a new PARENT/NAME, or NAME-2 and so on, which is gone again where the
    caller fails and leaves it empty."""
    if given is not None:
        yield given
        return
    with _disk_errors(parent / name), _made(parent):
        root = _claim(parent / name)
        with _empty_ones_removed([root]):
            yield root


def _claim(stem: Path) -> Path:
    for path in [stem, *(stem.with_name(f"{stem.name}-{number}") for number in range(2, 1000))]:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise BadInput(f"{stem}: too many runs of this name were started at once; give a directory with --run-dir")


@contextmanager
def _made(path: Path) -> Iterator[None]:
    """Make a directory and those above it."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    with _empty_ones_removed(missing):
        path.mkdir(parents=True, exist_ok=True)
        yield


@contextmanager
def _empty_ones_removed(made: Sequence[Path]) -> Iterator[None]:
    """Where the caller fails, remove what was made for it, innermost first, as far as nothing is in there."""
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        if not succeeded:
            with suppress(OSError):
                for folder in made:
                    folder.rmdir()


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
    unless it has set `keep`.

    Args:
        my_job: the Slurm job that this process is in, which may own the run.

    Raises:
        BadInput: the directory is in use, foreign or unwritable, or its run was asked for with other values.
    """
    run = RunDir(root)
    _refuse_foreign(run)
    with _disk_errors(root), _made(root), _locked(run):
        found = Opened(run, False, ())
        with _put_back_on_failure(found):
            _refuse_owned(run, my_job)
            altered: list[Change] = []
            if run.resolved.exists():
                altered = _accept_changes(run, recipe.config, change)
            found.finished = read_json(run.done) is not None and not altered
            found.changes = tuple(altered)
            if not found.finished:
                if altered:
                    _record_changes(run, altered, run.last_attempt() + 1)
                _write_recipe(run, recipe)
            yield found


@contextmanager
def _put_back_on_failure(found: Opened) -> Iterator[None]:
    run = found.run
    files = (run.recipe, run.resolved, run.plan, run.script, run.changes, run.done)
    before = {path: path.read_text(encoding="utf-8") if path.exists() else None for path in files}
    there = {path.name for path in run.root.iterdir()}
    code = _snapshot_of(run)
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        if succeeded or found.keep:
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


def clear(root: Path) -> None:
    """Remove all that is in a directory; the directory itself may be the user's."""
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


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
        ours = any(path.exists() for path in (run.lock, run.resolved, run.job))
        if run.root.is_dir() and any(run.root.iterdir()) and not ours:
            raise BadInput(f"{run.root}: is not empty and not a run directory; give a new or an empty one")


def _refuse_owned(run: RunDir, my_job: str | None) -> None:
    """A run belongs to the Slurm job that it was submitted as, until Slurm itself says that the job has ended."""
    record = read_json(run.job)
    if record is None or record["job_id"] == my_job:
        return
    from launcher.backends.slurm.jobs import read_recorded  # a new run asks nobody
    from launcher.runs.state import has_left

    job_id = record["job_id"]
    (job,) = read_recorded([record])
    ledger = read_json_lines(run.attempts_ledger)
    if has_left(job, ledger[-1] if ledger else None):
        return
    if job.kind == "unknown":
        raise BadInput(f"{run.root}: belongs to job {job_id}, and Slurm cannot be asked about it: {job.reason}")
    if job.owns:
        nodes = f" on {job.nodes}" if job.nodes else ""
        what = f"see it with mrl status {run.root.name}, end it with mrl cancel --drain {run.root.name}"
        if job.word == "COMPLETING":
            what = "Slurm is ending what is left of it there; try again in a moment"
        raise BadInput(f"{run.root}: belongs to job {job_id}, which is {job.word.lower()}{nodes}; {what}")


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
