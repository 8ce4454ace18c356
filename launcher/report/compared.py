"""Runs to compare: their directories, and what is recorded of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from launcher.errors import BadInput
from launcher.explain.record import read_record
from launcher.recipe.meaning import with_defaults
from launcher.report.compare import ComparedRun
from launcher.runs.find import at_once, find, is_run, newest_first
from launcher.runs.state import read_statuses
from megatron_rl.contract.files import names_in, seen
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.config import RunConfig


def runs_of(names: Sequence[str]) -> list[RunDir]:
    """Return the runs of names, directories or job ids: for a directory that is not a run, the runs in it, by name; for
    the beginning of several names, such as those of a sweep, all of these. Files are passed over if there is something
    else: a pattern of the shell also finds the logs beside the runs. Raises BadInput where there is none."""
    found: dict[Path, RunDir] = {}
    others = [name for name in names if not seen(Path(name).is_file)]
    for name in others or names:
        for run in _runs_of(name):
            found.setdefault(run.root.resolve(), run)
    return list(found.values())


def _runs_of(name: str) -> list[RunDir]:
    path = Path(name)
    if is_run(name):
        return [RunDir(path)]
    if seen(path.is_dir):
        return _runs_in(path)
    if "/" in name and path.name and seen(path.parent.is_dir):
        beside = (path.parent / one for one in sorted(names_in(path.parent)) if one.startswith(path.name))
        begun = [RunDir(one) for one in beside if is_run(str(one))]
    else:
        begun = [RunDir(entry.run_dir) for entry in newest_first(name)] if name.strip() and not name.isdigit() else []
    exact = [run for run in begun if run.root.name == path.name]
    return exact if len(exact) == 1 else begun if len(begun) > 1 else [find(name)]


def _runs_in(folder: Path) -> list[RunDir]:
    try:
        paths = [folder / name for name in sorted(names_in(folder))]
    except OSError as error:
        raise BadInput(f"{folder}: {error.strerror}") from error
    runs = [RunDir(path) for path in paths if is_run(str(path))]
    if not runs:
        raise BadInput(f"{folder}: is not a run, and has none in it")
    return runs


def read_compared(runs: Sequence[RunDir]) -> list[ComparedRun]:
    """Read the records of runs. Their recipes have defaults for the keys that an older mrl did not know.
    Raises Failed and BadInput as `read_record`."""
    statuses = read_statuses(runs)
    records = at_once(partial(read_record, answers=False), runs)
    return [
        ComparedRun(
            status.name,
            str(run.root.absolute()),
            status.state,
            replace(record, recipe=with_defaults(record.recipe, RunConfig)),
        )
        for run, status, record in zip(runs, statuses, records, strict=True)
    ]
