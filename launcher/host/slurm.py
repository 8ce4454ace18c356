"""The few things that the batch host asks of Slurm and tells it. Every call is bounded in time."""

import re
import subprocess
from typing import Dict, List, Optional, Sequence

TIME_LIMIT = 30.0  # seconds; a busy controller answers late, a dead one never

# In `scontrol show job -o` values may hold blanks; a key starts a field only after one and looks like this.
_FIELD = re.compile(r"(?:^|\s)([A-Z][A-Za-z0-9_/:]*)=")


class SlurmRefused(Exception):
    """Slurm could not be asked, or said no: the command and what it answered."""


def parse_fields(line: str) -> Dict[str, str]:
    """Key -> value of one line of `scontrol show ... -o`."""
    found = list(_FIELD.finditer(line))
    ends = [match.start() for match in found[1:]] + [len(line)]
    return {match.group(1): line[match.end() : end].strip() for match, end in zip(found, ends)}


def show_job(job_id: str) -> Dict[str, str]:
    """Slurm's record of one job. Raises SlurmRefused, also for a job that Slurm does not know."""
    return parse_fields(_run(["scontrol", "show", "job", "-o", job_id]).strip())


def alive(job_id: str) -> Optional[bool]:
    """Whether a job waits or runs; None where Slurm could not be asked: unknown is not gone."""
    try:
        state = show_job(job_id).get("JobState", "")
    except SlurmRefused as error:
        return False if "Invalid job id" in str(error) else None
    return state in ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED", "SIGNALING", "RESIZING",
                     "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "STAGE_OUT")  # fmt: skip


def hostnames(nodelist: str) -> List[str]:
    """`node[01-03],x` -> one name each. Local: asks no daemon."""
    return _run(["scontrol", "show", "hostnames", nodelist]).split()


def signal_steps(job_id: str, name: str) -> None:
    """Send a signal to the steps of a job; its batch shell does not get it."""
    _run(["scancel", "--signal={}".format(name), job_id])


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


def _run(command: List[str]) -> str:
    asked = " ".join(command)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=TIME_LIMIT,
            universal_newlines=True,
        )
    except FileNotFoundError:
        raise SlurmRefused("{}: no such command here".format(command[0])) from None
    except subprocess.TimeoutExpired:
        raise SlurmRefused("{}: no answer within {:.0f} s".format(asked, TIME_LIMIT)) from None
    if done.returncode:
        raise SlurmRefused("{}: {}".format(asked, (done.stderr or done.stdout).strip()))
    return done.stdout
