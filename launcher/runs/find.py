"""Lookup of runs: an index of everything this account submitted, and names of runs on the command line.

A run is its directory and nothing else. The index only helps to find it, and may be deleted.
"""

from __future__ import annotations

import difflib
import errno
import shlex
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress, islice
from pathlib import Path
from typing import Any, TypeVar

from launcher.errors import BadInput
from launcher.host.record.identity import index_file
from launcher.host.slurm.call import SlurmRefused
from launcher.host.slurm.queries import show_job
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, read_lines
from megatron_rl.contract.run_records import Submission

NEAR = 5  # names to suggest where one was not found
AHEAD = 64  # directories to check ahead of the caller
LOOKERS = 16  # threads

T = TypeVar("T")


def newest_first(begun: str = "", unread: list[str] | None = None) -> Iterator[Submission]:
    """Last submission of each run whose directory exists and whose name has this prefix, newest run first. Directories
    are checked as needed: on a network file system ten thousand checks take long. Messages about skipped lines of the
    index go to `unread`. Raises BadInput where it cannot be read."""
    newest: dict[str, Submission] = {}
    for entry in reversed(_submissions(unread)):
        if Path(entry.run_dir).name.startswith(begun):
            newest.setdefault(entry.run_dir, entry)
    known = iter(newest.values())
    while part := list(islice(known, AHEAD)):
        there = at_once(is_run, [entry.run_dir for entry in part])
        yield from compress(part, there)


def at_once(look: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
    """Map `look` over sequences of arguments in many threads: a network file system answers each call late."""
    with ThreadPoolExecutor(LOOKERS) as threads:
        return list(threads.map(look, *arguments))


def find(name: str | None) -> RunDir:
    """Run of a name, a prefix of one, a path or a job id; None: the newest. Raises BadInput unless there is one."""
    if name is not None and not name.strip():
        raise BadInput("RUN is empty; give a name, a directory or a job id (`mrl ls` lists the runs)")
    if name is not None and is_run(name):
        return RunDir(name)
    if name is None:
        newest = next(newest_first(), None)
        if newest is None:
            raise BadInput("no run has been submitted by this account yet; name one by its directory")
        return RunDir(newest.run_dir)
    return RunDir(_of_job(name) if name.isdigit() else _named(name))


def names_run(text: str) -> bool:
    if is_run(text):
        return True
    try:
        return any(Path(entry.run_dir).name == text for entry in newest_first(text))
    except BadInput:  # the index cannot be read, as `find` reports where it needs it
        return False


def pasteable_command(subcommand: str, run: str, more: str = "") -> str:
    """Command such as `mrl cancel --drain 'my run'`, quoted for a shell except for `more`."""
    dashes = "--" if run.startswith("-") else ""
    return " ".join(filter(None, ("mrl", subcommand, dashes, shlex.quote(run), more)))


def _submissions(unread: list[str] | None = None) -> list[Submission]:
    """All entries of the index, oldest first, including those of deleted runs. Raises BadInput."""
    lines = read_lines(Submission, index_file())
    if isinstance(lines, Unreadable):
        raise BadInput(f"{lines}; name a run by its directory, or remove that file: it only lists runs")
    if lines.damaged and unread is not None:
        unread.append(f"{index_file()}: {len(lines.damaged)} of its lines cannot be read")
    return lines.records


def _of_job(job_id: str) -> str:
    submitted = (
        entry.run_dir for entry in reversed(_submissions()) if job_id in (entry.job_id, Path(entry.run_dir).name)
    )
    paths = [path for path in dict.fromkeys(submitted) if is_run(path)]
    if len(paths) > 1:  # two clusters, a reused id, or a run whose name is a number
        raise BadInput(f"{job_id} is the job or the name of {len(paths)} runs; give the path:{_listed(paths)}")
    if paths:
        return paths[0]
    try:  # a job of plain sbatch is not in the index; its log stands beside its run directory
        log = Path(show_job(job_id).get("StdOut", ""))
    except SlurmRefused:
        log = Path()
    if log.name.endswith(".log") and is_run(str(log.with_suffix(""))):
        return str(log.with_suffix(""))
    raise BadInput(f"no run with job {job_id} is known; `mrl ls` lists the runs, a path names any")


def _named(name: str) -> str:
    begun = [entry.run_dir for entry in newest_first(name)]
    found = [path for path in begun if Path(path).name == name] or begun
    if len(found) == 1:
        return found[0]
    if found:
        raise BadInput(f"{name!r} means {len(found)} runs; give the whole name or the path:{_listed(found)}")
    absent = [entry.run_dir for entry in _submissions() if name in (Path(entry.run_dir).name, entry.run_dir)]
    if absent:
        log = RunDir(absent[-1]).batch_log
        more = f"; {log} may say how its ranks ended" if log.is_file() else ""
        raise BadInput(f"the directory of the run {name!r} is gone: {absent[-1]}{more}")
    names = [Path(entry.run_dir).name for entry in newest_first()]
    close = difflib.get_close_matches(name, names, n=NEAR)
    hint = f"did you mean {', '.join(close)}?" if close else "`mrl ls` lists them"
    raise BadInput(f"no run is called {name!r}; {hint}")


def _listed(paths: Sequence[str]) -> str:
    more = f"\n  and {len(paths) - NEAR} more" if len(paths) > NEAR else ""
    return "".join(f"\n  {path}" for path in paths[:NEAR]) + more


def is_run(path: str) -> bool:
    """Whether a directory is a run's, or may be one that this user cannot read."""
    try:
        return bool(path) and RunDir(path).resolved.is_file()
    except OSError as error:
        return error.errno not in (errno.ENAMETOOLONG, errno.ELOOP) and _may_be_directory(path)
    except ValueError:  # a name that no file can have
        return False


def _may_be_directory(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except OSError:
        return True
