"""The few things that the batch host asks of Slurm and tells it. Every call is bounded in time."""

import os
import re
import subprocess
import time
from typing import Callable, Dict, List, Optional, Sequence, TypeVar

TIME_LIMIT = 30.0  # seconds; a busy controller answers late, a dead one never
PATIENCE = 120.0  # seconds over which a silent controller is asked again where much hangs on its answer
ASK_AGAIN = 5.0

# Slurm's words for a job that is over. Any other word, a future version's too, means that it may still run.
ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)

# In `scontrol show job -o` values may hold blanks; a key starts a field only after one and looks like this.
_FIELD = re.compile(r"(?:^|\s)([A-Z][A-Za-z0-9_/:]*)=")

_SILENT = re.compile(
    r"timed out|unable to contact|connection refused|communication|zero bytes|temporarily|try again", re.IGNORECASE
)

Result = TypeVar("Result")


class SlurmRefused(Exception):
    """Slurm said no, or could not be asked (SlurmSilent): the command and what it answered."""


class SlurmSilent(SlurmRefused):
    """Slurm could not be asked. Says nothing about any job."""


def patiently(ask: Callable[[], Result], patience: float = PATIENCE) -> Result:
    """What `ask` returns, asked again while Slurm is silent. Raises SlurmRefused."""
    give_up = time.monotonic() + patience
    while True:
        try:
            return ask()
        except SlurmSilent:
            if time.monotonic() >= give_up:
                raise
            time.sleep(ASK_AGAIN)


def parse_fields(line: str) -> Dict[str, str]:
    """Key -> value of one line of `scontrol show ... -o`."""
    found = list(_FIELD.finditer(line))
    ends = [match.start() for match in found[1:]] + [len(line)]
    return {match.group(1): line[match.end() : end].strip() for match, end in zip(found, ends)}


def show_job(job_id: str) -> Dict[str, str]:
    """Slurm's record of one job. Raises SlurmRefused, also for a job that Slurm does not know."""
    return parse_fields(_run(["scontrol", "show", "job", "-o", job_id]).strip())


def alive(job_id: str) -> Optional[bool]:
    """Whether a job may still run; None where Slurm could not be asked: unknown is not gone."""
    try:
        return patiently(lambda: show_job(job_id)).get("JobState") not in ENDED
    except SlurmRefused as error:
        return False if "Invalid job id" in str(error) else None


def hostnames(nodelist: str) -> List[str]:
    """`node[01-03],x` -> one name each. Local: asks no daemon."""
    return _run(["scontrol", "show", "hostnames", nodelist]).split()


def node_states(hosts: Sequence[str]) -> Dict[str, str]:
    """Node -> Slurm's word for it: `idle`, `allocated`, `down*`; the star: it does not answer."""
    told = _run(["sinfo", "--all", "--noheader", "--Node", "--nodes=" + ",".join(hosts), "--format=%N %T"])
    return dict(line.split() for line in told.splitlines() if line.strip())  # one line for each of its partitions


def signal_steps(job_id: str, name: str) -> None:
    """Send a signal to the steps of a job; its batch shell does not get it."""
    _run(["scancel", "--signal={}".format(name), job_id])


def kill_steps(job_id: str) -> None:
    """End the steps of a job and leave its batch script alone."""
    steps = _run(["squeue", "--noheader", "--steps", "--jobs=" + job_id, "--format=%i"]).split()
    ours = [step for step in steps if step.rpartition(".")[2].isdigit()]  # neither 7.batch nor 7.extern
    if ours:
        _run(["scancel", "--signal=KILL"] + ours)


def requeue(job_id: str) -> None:
    _run(["scontrol", "requeue", job_id])


def exclude(job_id: str, hosts: Sequence[str]) -> None:
    """Keep a pending job away from these nodes as well as from those it already avoids (the set is replaced)."""
    before = show_job(job_id).get("ExcNodeList", "")
    avoided = [] if before in ("", "(null)") else hostnames(before)
    _run(["scontrol", "update", "JobId=" + job_id, "ExcNodeList=" + ",".join(sorted(set(avoided) | set(hosts)))])


def version() -> List[int]:
    """[22, 5, 8]; empty where it cannot be told."""
    try:
        return [int(part) for part in re.findall(r"\d+", _run(["scontrol", "--version"]))[:3]]
    except SlurmRefused:
        return []


def environment() -> Dict[str, str]:
    """Ours without what a user sets to shape the output of Slurm's commands."""
    shaping = ("SQUEUE_", "SACCT_", "SCONTROL_", "SCANCEL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(shaping)}
    return dict(kept, SLURM_TIME_FORMAT="standard", LC_ALL="C")


def _run(command: List[str]) -> str:
    asked = " ".join(command)
    try:
        done = subprocess.run(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=TIME_LIMIT,
            universal_newlines=True,
        )
    except FileNotFoundError:
        raise SlurmRefused("{}: no such command here".format(command[0])) from None
    except subprocess.TimeoutExpired:
        raise SlurmSilent("{}: no answer within {:.0f} s".format(asked, TIME_LIMIT)) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        kind = SlurmSilent if _SILENT.search(said) else SlurmRefused
        raise kind("{}: {}".format(asked, said))
    return done.stdout
