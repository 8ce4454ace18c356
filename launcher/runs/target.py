"""The run that a command ends, and whether the user may have meant another one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.errors import BadInput
from launcher.runs.find import NEAR, find, is_run, newest_first
from launcher.runs.state import RunStatus, read_statuses
from megatron_rl.contract.paths import RunDir


@dataclass(frozen=True, slots=True)
class Target:
    """Run that a command is about."""

    status: RunStatus
    doubt: str
    """Why another run may be meant; empty where this one was named in full."""


def target_of(name: str | None) -> Target:
    """Run of a directory, a name, a prefix of one, or the id of its present job.

    Args:
        name: None: the only run that is queued or running.

    Raises:
        BadInput: there is none, or more than one, or the directory is a copy of a run's.
    """
    if name is None:
        runs = [RunDir(one.run_dir) for one in newest_first()]
        return Target(_only([one for one in read_statuses(runs) if one.alive]), "no RUN was given")
    (status,) = read_statuses([find(name)])
    if status.state == "copy":
        raise BadInput(f"{status.run.root}: is {status.reason}")
    if is_run(name):
        return Target(status, "")
    if name.isdigit() and name != status.name:
        job_id = status.job.job_id if status.job else None
        if job_id != name and status.alive:
            now = f"has job {job_id} now" if job_id else "is a local run now"
            raise BadInput(f"job {name} was an earlier job of {status.name}, which {now}; name the run, or that job")
        return Target(status, "")
    return Target(status, "" if Path(status.run.root).name == name else f"{name!r} is only the start of its name")


def _only(alive: list[RunStatus]) -> RunStatus:
    if not alive:
        raise BadInput("no run of this account is queued or running; name one (`mrl ls` lists them)")
    if len(alive) > 1:
        shown = "".join(f"\n  {one.name} ({one.state}) in {one.run.root.absolute().parent}" for one in alive[:NEAR])
        more = f"\n  and {len(alive) - NEAR} more" if len(alive) > NEAR else ""
        raise BadInput(f"RUN is missing, and {len(alive)} runs may be meant; name one:{shown}{more}")
    return alive[0]
