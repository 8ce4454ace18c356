"""Which runs there are: an index of everything this account submitted, and how a run is named on the command line.

A run is its directory, nothing else: the index only helps to find it, and may be deleted.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import BadInput
from launcher.host.record.submissions import index_file
from launcher.host.slurm.client import SlurmRefused
from launcher.host.slurm.client import show_job
from megatron_rl.contract.paths import RunDir
from megatron_rl.run_dir import read_json_lines

NEAR = 5  # names to offer where one was not found


@dataclass(frozen=True, slots=True)
class Entry:
    """One submission."""

    run_dir: str
    """Absolute."""
    cluster: str
    job_id: str | None
    """Slurm's; None for a local run."""
    at: float
    """Unix seconds."""

    @property
    def name(self) -> str:
        return Path(self.run_dir).name


def submissions() -> list[Entry]:
    """Every submission whose run directory is still there, oldest first."""
    return [entry for entry in (Entry(**line) for line in read_json_lines(index_file())) if _is_run(entry.run_dir)]


def runs(entries: Sequence[Entry]) -> list[Entry]:
    """The last submission of each run, newest first."""
    newest: dict[str, Entry] = {}
    for entry in reversed(entries):
        newest.setdefault(entry.run_dir, entry)
    return list(newest.values())


def find(asked: str | None) -> RunDir:
    """The run that is meant by a name, the beginning of one, a path, a job id, or by nothing: the newest.

    Raises:
        BadInput: there is none, or more than one.
    """
    if asked is not None and _is_run(asked):
        return RunDir(asked)
    entries = submissions()
    if asked is None:
        if not entries:
            raise BadInput("no run has been submitted by this account yet; name one by its directory")
        return RunDir(runs(entries)[0].run_dir)
    if asked.isdigit():
        return _of_job(asked, entries)
    return RunDir(_named(asked, [entry.run_dir for entry in runs(entries)]))


def _of_job(job_id: str, entries: Sequence[Entry]) -> RunDir:
    for entry in reversed(entries):
        if entry.job_id == job_id:
            return RunDir(entry.run_dir)
    try:  # it may have been submitted by plain sbatch: its log stands beside its run directory
        log = Path(show_job(job_id).get("StdOut", ""))
    except SlurmRefused:
        log = Path()
    if _is_run(str(log.with_suffix("")) if log.name.endswith(".log") else ""):
        return RunDir(log.with_suffix(""))
    raise BadInput(f"no run with job {job_id} is known; `mrl ls` lists the runs, a path names any")


def _named(asked: str, paths: Sequence[str]) -> str:
    exact = [path for path in paths if Path(path).name == asked]
    found = exact or [path for path in paths if Path(path).name.startswith(asked)]
    if len(found) == 1:
        return found[0]
    if found:
        shown = "".join(f"\n  {path}" for path in found[:NEAR])
        more = f"\n  and {len(found) - NEAR} more" if len(found) > NEAR else ""
        raise BadInput(f"{asked!r} means {len(found)} runs; give the whole name or the path:{shown}{more}")
    names = [Path(path).name for path in paths]
    close = difflib.get_close_matches(asked, names, n=NEAR)
    hint = f"did you mean {', '.join(close)}?" if close else "`mrl ls` lists them"
    raise BadInput(f"no run is called {asked!r}; {hint}")


def _is_run(path: str) -> bool:
    return bool(path) and RunDir(path).resolved.is_file()
