"""The run directory before an attempt: created or opened, and restored where the caller fails."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import BadInput
from launcher.host.process.lock import RunIsOwned, RunLock
from launcher.host.record.identity import identify
from launcher.job.admission import (
    accepted_changes,
    corrections,
    has_work,
    keys_file,
    refuse_foreign,
    refuse_owned,
    with_date,
)
from launcher.job.directories import PRIVATE, clear, disk_errors, made
from launcher.job.kept_files import keep_files
from launcher.recipe.changes import Change, as_json
from launcher.recipe.load import Recipe, asked_text, dump_resolved
from launcher.recipe.located_yaml import read_text
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import TRACKERS, Attempt, RunDir
from megatron_rl.contract.records import UnreadableRecord, append
from megatron_rl.contract.run_records import RecipeChange


@dataclass(slots=True)
class OpenedRun:
    """A run directory whose lock this process holds, with the recipe written into it."""

    run: RunDir
    finished: bool
    changes: tuple[Change, ...]
    corrected: bool = False
    """Whether the changes correct a run in which nothing was trained yet: it starts over and keeps only the record of
    its attempts."""
    run_id: str = ""
    attempt: Attempt | None = None  # attempt that `prepare` made; None: the run is finished
    handed_over: bool = False  # set once a job may use the directory: from then on a failure leaves it as it is


def prepare(recipe: Recipe, root: Path, change: bool) -> OpenedRun:
    """Write the recipe into `root` and create the next attempt there, unless the run is finished. Raises BadInput like
    `opened`."""
    with opened(recipe, root, change) as found:
        if not found.finished:
            attempt = found.attempt = found.run.attempt(found.run.last_attempt() + 1)
            attempt.folder.mkdir(parents=True)
            attempt.logs.mkdir(parents=True, exist_ok=True)
        return found


@contextmanager
def opened(
    recipe: Recipe,
    root: Path,
    change: bool,
    my_job: str | None = None,
    source: RunDir | None = None,
    code_of: RunDir | None = None,
) -> Iterator[OpenedRun]:
    """Lock `root` and write the recipe into it. Where the caller fails everything is restored, unless it has set
    `handed_over`. Raises BadInput where the directory is in use, foreign or unwritable, or its run has other values.

    Args:
        my_job: Slurm job of this process, which may own the run.
        source: run whose copies of the user's code a new run takes over.
        code_of: run whose snapshot of the code will read the recipe, if it has one; None: today's code will.
    """
    run = RunDir(root)
    refuse_foreign(run)
    with disk_errors(root), made(root, PRIVATE), _locked(run):
        found = OpenedRun(run, False, ())
        with _put_back_on_failure(found), ExitStack() as aside:
            refuse_owned(run, my_job)
            recipe = with_date(recipe, run)
            altered: list[Change] = []
            if run.resolved.exists():
                found.corrected = bool(corrections(run, recipe))
                altered = accepted_changes(run, recipe, change)
            found.finished = run.done.exists() and not altered
            found.changes = tuple(altered)
            found.run_id = _run_id(run)
            if found.corrected:
                aside.enter_context(_set_aside(found))
            if not found.finished:
                replaced = keep_files(run, recipe, renew=change or not has_work(run), source=source)
                altered += replaced if change else []
                if altered and not found.corrected:
                    _record_changes(run, altered, run.last_attempt() + 1)
                found.changes = tuple(altered)
                _write_recipe(run, recipe, None if code_of is None else keys_file(code_of))
            yield found


@contextmanager
def _set_aside(found: OpenedRun) -> Iterator[None]:
    """Move all files except the record of attempts aside, since they come from the recipe that is corrected. They
    return where the caller fails, and are deleted otherwise."""
    run = found.run
    kept = {run.lock, run.job_lock, run.identity, run.job, run.attempts_ledger, run.attempt(1).folder.parent}
    kept |= {run.attempt(1).logs.parent, run.token}
    aside = run.root / f".before.{os.getpid()}.tmp"
    before = [path for path in run.root.iterdir() if path not in kept]
    aside.mkdir(mode=PRIVATE)
    try:
        for path in before:
            path.rename(aside / path.name)
        yield
    except BaseException:
        if not found.handed_over:
            for path in run.root.iterdir():
                if path not in kept and path != aside:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            for path in aside.iterdir():
                path.rename(run.root / path.name)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _put_back_on_failure(found: OpenedRun) -> Iterator[None]:
    run = found.run
    files = [run.recipe, run.resolved, run.evaluation_request, run.plan, run.script]
    files += [run.changes, run.done, run.identity, run.job, *map(run.tracker, TRACKERS)]
    # Three cases. A new directory holds only our lock, so it is emptied, also of files that the caller made. One with a
    # run in it gets back each of its files that has changed: the link to the code first, since files may name it. Once
    # `handed_over` is set nothing is touched, whatever fails: sbatch may have accepted a job whose answer was lost, and
    # that job would find its script and its recipe gone.
    before = {path: (_version_of(path), read_text(path) if path.exists() else None) for path in files}
    there = {path.name for path in run.root.iterdir()}
    code = _snapshot_of(run)
    try:
        yield
    except BaseException:
        if not found.handed_over and there == {run.lock.name}:
            clear(run.root)
        elif not found.handed_over:
            _put_code_back(run, code, there)
            if run.kept_files.name not in there:
                shutil.rmtree(run.kept_files, ignore_errors=True)
            for path, (version, text) in before.items():
                if _version_of(path) == version:
                    continue  # unchanged
                if text is None:
                    path.unlink(missing_ok=True)
                else:
                    write_atomic(path, text)
        raise


def _version_of(path: Path) -> tuple[int, int] | None:
    """Value that changes when the file is replaced; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _snapshot_of(run: RunDir) -> Path | None:
    return run.code.readlink() if run.code.is_symlink() else None


def _put_code_back(run: RunDir, before: Path | None, there: set[str]) -> None:
    if _snapshot_of(run) != before:
        if before is None:
            run.code.unlink()
        else:
            link = run.code.with_name(f".{run.code.name}.{os.getpid()}")
            link.symlink_to(before)
            link.replace(run.code)
    for snapshot in run.root.glob(f"{run.code.name}-*"):
        if snapshot.name not in there:
            shutil.rmtree(snapshot, ignore_errors=True)


def _run_id(run: RunDir) -> str:
    try:
        return identify(run).id
    except UnreadableRecord as error:
        raise BadInput(f"{error}, so the run's identity is unknown; remove the file if this is not a copy") from error


def _record_changes(run: RunDir, altered: Sequence[Change], attempt: int) -> None:
    from getpass import getuser  # slow to import

    append(run.changes, RecipeChange(attempt, as_json(altered), time.time(), getuser()))
    if any(one.key == "training.steps" or one.key.startswith("training.early_stop") for one in altered):
        run.done.unlink(missing_ok=True)  # before resolved.yaml: DONE must never stand beside unfinished steps


def _write_recipe(run: RunDir, recipe: Recipe, keys_of: Path | None) -> None:
    if not run.recipe.exists():
        write_atomic(run.recipe, asked_text(recipe))
    if recipe.evaluation:
        write_atomic(run.evaluation_request, recipe.evaluation.model_dump_json(indent=2) + "\n")
    write_atomic(run.resolved, dump_resolved(recipe.config, keys_of))


@contextmanager
def _locked(run: RunDir) -> Iterator[None]:
    ours = not run.lock.exists()
    try:
        lock = RunLock(run.lock, "mrl-submit, which is preparing it", patience=1.0)
    except RunIsOwned as error:
        raise BadInput(f"{run.root}: {error}") from error
    except OSError:
        _remove_alone(run.lock, ours)
        raise
    try:
        yield
    except BaseException:
        _remove_alone(run.lock, ours)
        raise
    finally:
        lock.release()


def _remove_alone(lock: Path, ours: bool) -> None:
    with suppress(OSError):
        if ours and [path.name for path in lock.parent.iterdir()] == [lock.name]:
            lock.unlink()
