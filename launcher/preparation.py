"""The run directory before an attempt: make it, or check that the run in it is the one that is asked for."""

from __future__ import annotations

import getpass
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.changes import CHANGEABLE, Change, changes
from launcher.errors import BadInput
from launcher.host.lock import RunIsOwned, RunLock
from launcher.recipe import Recipe, dump_resolved, read_resolved
from megatron_rl.config import RunConfig
from megatron_rl.run_dir import Attempt, RunDir, append_json_line, read_json, write_atomic


@dataclass(frozen=True, slots=True)
class Prepared:
    run: RunDir
    attempt: Attempt | None
    """The attempt to start; None: the run is finished and there is nothing to do."""
    changes: tuple[Change, ...]
    """What `--change` altered."""


def new_run_dir(name: str, now: time.struct_time) -> Path:
    """runs/NAME-DATE-TIME below the current directory, made, and never one that was there."""
    stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S', now)}"
    with _disk_errors(stem):
        stem.parent.mkdir(exist_ok=True)
        for path in [stem, *(stem.with_name(f"{stem.name}-{number}") for number in range(2, 1000))]:
            try:
                path.mkdir()
                return path
            except FileExistsError:
                continue
    raise BadInput(f"{stem}: too many runs were started in this second; give one with --run-dir")


def prepare(recipe: Recipe, root: Path, change: bool) -> Prepared:
    """Write what was asked into `root` and open the next attempt there, or find the run finished.

    Raises:
        BadInput: the directory is in use, foreign or unwritable, or its run was asked for with other values.
    """
    run = RunDir(root)
    _refuse_foreign(run)
    with _disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        with _locked(run):
            altered: list[Change] = []
            if run.resolved.exists():
                altered = _accept_changes(run, recipe.config, change)
                if read_json(run.done) is not None and not altered:
                    return Prepared(run, None, ())
            attempt = run.attempt(run.last_attempt() + 1)
            if altered:
                _record_changes(run, altered, attempt.number)
            _write_recipe(run, recipe)
            attempt.folder.mkdir(parents=True)
            attempt.logs.mkdir(parents=True, exist_ok=True)
            return Prepared(run, attempt, tuple(altered))


def check(recipe: Recipe, root: Path, change: bool) -> list[Change]:
    """What `prepare` would refuse, without touching anything (for --dry-run); returns the changes."""
    run = RunDir(root)
    _refuse_foreign(run)
    return _accept_changes(run, recipe.config, change) if run.resolved.exists() else []


def _refuse_foreign(run: RunDir) -> None:
    with _disk_errors(run.root):
        if run.root.exists() and not run.root.is_dir():
            raise BadInput(f"{run.root}: is a file, not a directory")
        if run.root.is_dir() and any(run.root.iterdir()) and not run.lock.exists() and not run.resolved.exists():
            raise BadInput(f"{run.root}: is not empty and not a run directory; give a new or an empty one")


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
    line = {
        "at": time.time(),
        "by": getpass.getuser(),
        "attempt": attempt,
        "changes": {one.key: [one.old, one.new] for one in altered},
    }
    append_json_line(run.changes, line)
    if any(one.key == "training.steps" for one in altered):
        run.done.unlink(missing_ok=True)  # before resolved.yaml: DONE must never be seen with steps still to do


def _write_recipe(run: RunDir, recipe: Recipe) -> None:
    if not run.recipe.exists():
        asked = "".join(f"# override: {override}\n" for override in recipe.overrides)
        write_atomic(run.recipe, asked + recipe.text)
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
