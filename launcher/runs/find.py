"""Which runs there are: an index of everything this account submitted, and how a run is named on the command line.

A run is its directory, nothing else: the index only helps to find it, and may be deleted.
"""

from __future__ import annotations

import difflib
import errno
import shlex
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import BadInput
from launcher.host.record.submissions import index_file
from launcher.host.slurm.ask import show_job
from launcher.host.slurm.call import SlurmRefused
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, read_lines
from megatron_rl.contract.run_records import Submission

NEAR = 5  # names to offer where one was not found


def submissions() -> list[Submission]:
    """Every submission whose run directory is still there, oldest first. Raises BadInput where the index cannot be
    read; lines of it that cannot are left out."""
    lines = read_lines(Submission, index_file())
    if isinstance(lines, Unreadable):
        raise BadInput(f"{lines}; name a run by its directory, or remove that file: it only lists runs")
    return [one for one in lines.records if is_run(one.run_dir)]


def newest_first(entries: Sequence[Submission]) -> list[Submission]:
    """The last submission of each run, the newest run first."""
    newest: dict[str, Submission] = {}
    for entry in reversed(entries):
        newest.setdefault(entry.run_dir, entry)
    return list(newest.values())


def find(name: str | None) -> RunDir:
    """The run that is meant by a name, the beginning of one, a path, a job id, or by nothing: the newest.

    Raises:
        BadInput: there is none, or more than one.
    """
    if name is not None and not name.strip():
        raise BadInput("RUN is empty; give a name, a directory or a job id (`mrl ls` lists the runs)")
    if name is not None and is_run(name):
        return RunDir(name)
    entries = submissions()
    if name is None:
        if not entries:
            raise BadInput("no run has been submitted by this account yet; name one by its directory")
        return RunDir(newest_first(entries)[0].run_dir)
    if name.isdigit():
        return _of_job(name, entries)
    return RunDir(_named(name, [entry.run_dir for entry in newest_first(entries)]))


def pasteable_command(words: str, run: str, more: str = "") -> str:
    """`mrl cancel --drain 'my run'`: whatever the run is called, a shell and mrl take it for that one word.

    Args:
        words: subcommand and options.
        run: name or path.
        more: what follows the run, as it is.
    """
    dashes = "--" if run.startswith("-") else ""
    return " ".join(filter(None, ("mrl", words, dashes, shlex.quote(run), more)))


def _of_job(job_id: str, entries: Sequence[Submission]) -> RunDir:
    paths = list(dict.fromkeys(entry.run_dir for entry in reversed(entries) if entry.job_id == job_id))
    if len(paths) > 1:  # of two clusters, or an id that was used again
        raise BadInput(f"job {job_id} was one of {len(paths)} runs; give the name or the path:{_listed(paths)}")
    if paths:
        return RunDir(paths[0])
    try:  # it may have been submitted by plain sbatch: its log stands beside its run directory
        log = Path(show_job(job_id).get("StdOut", ""))
    except SlurmRefused:
        log = Path()
    if log.name.endswith(".log") and is_run(str(log.with_suffix(""))):
        return RunDir(log.with_suffix(""))
    raise BadInput(f"no run with job {job_id} is known; `mrl ls` lists the runs, a path names any")


def _named(name: str, paths: Sequence[str]) -> str:
    exact = [path for path in paths if Path(path).name == name]
    found = exact or [path for path in paths if Path(path).name.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise BadInput(f"{name!r} means {len(found)} runs; give the whole name or the path:{_listed(found)}")
    names = [Path(path).name for path in paths]
    close = difflib.get_close_matches(name, names, n=NEAR)
    hint = f"did you mean {', '.join(close)}?" if close else "`mrl ls` lists them"
    raise BadInput(f"no run is called {name!r}; {hint}")


def _listed(paths: Sequence[str]) -> str:
    more = f"\n  and {len(paths) - NEAR} more" if len(paths) > NEAR else ""
    return "".join(f"\n  {path}" for path in paths[:NEAR]) + more


def is_run(path: str) -> bool:
    """Whether a directory is a run's, or may be one that we are not allowed to look into."""
    try:
        return bool(path) and RunDir(path).resolved.is_file()
    except OSError as error:
        return error.errno not in (errno.ENAMETOOLONG, errno.ELOOP)
    except ValueError:  # a name that no file can have
        return False
