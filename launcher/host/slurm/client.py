"""The few things that the batch host asks of Slurm and tells it. Every call is bounded in time."""

import os
import re
import subprocess
import time
from typing import Callable, Dict, List, Optional, Sequence, TypeVar

from launcher.host.judge.causes import CLOCK, time_of

TIME_LIMIT = 30.0  # seconds; a busy controller answers late, a dead one never
PATIENCE = 120.0  # seconds over which a silent controller is asked again where much hangs on its answer
ASK_AGAIN = 5.0
KILL_WAIT = 30.0  # seconds: Slurm's default

# Of the environment that a job passes on to one that it submits
OF_THIS_JOB = ("SLURM_", "SBATCH_", "MRL_ATTEMPT", "MRL_NODES_GIVEN")
OF_ANY_JOB = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")

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

# sbatch --test-only on a script that excludes more nodes than it can do without
_TOO_FEW = re.compile(r"configuration (is )?not available", re.IGNORECASE)

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


def is_completing(job_id: str) -> bool:
    """Whether a job is over but for what it has left on its nodes; not so where Slurm cannot be asked."""
    try:
        return show_job(job_id).get("JobState") == "COMPLETING"
    except SlurmRefused:
        return False


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


def preemption_cancels(job: Dict[str, str]) -> bool:
    """Whether a preemption ends this job for good: as the cluster has it, or because the job may not be requeued.

    Args:
        job: its record.
    """
    if time_of(job.get("PreemptTime")) is None:
        return False  # not being preempted: spare the controller the question
    if job.get("Requeue") == "0":
        return True
    try:
        config = _config()
        mode = config.get("PreemptMode", "")
        if config.get("PreemptType") == "preempt/partition_prio":
            shown = _run(["scontrol", "show", "partition", "-o", job.get("Partition", "")])
            mode = parse_fields(shown.strip()).get("PreemptMode", mode)
        elif config.get("PreemptType") == "preempt/qos":
            named = "name=" + job.get("QOS", "")
            told = _run(["sacctmgr", "-n", "-P", "show", "qos", named, "format=PreemptMode"]).strip()
            mode = mode if told in ("", "cluster") else told
    except SlurmRefused:
        return False
    return "CANCEL" in mode.upper()


def kill_wait() -> float:
    """Seconds between SIGTERM and SIGKILL at the end of a job."""
    try:
        found = re.match(r"\d+", _config().get("KillWait", ""))
    except SlurmRefused:
        found = None
    return float(found.group()) if found else KILL_WAIT


def ended_as(job_id: str, began: float) -> Optional[str]:
    """Slurm's word for the end of what ran under this job id at a time, where there is accounting: a job that was
    requeued has one entry for each of its starts. None where it cannot be told."""
    try:
        rows = _run(["sacct", "-n", "-P", "-X", "-D", "-j", job_id, "-o", "State,Start"]).splitlines()
    except SlurmRefused:
        return None
    starts = [(time_of(row.partition("|")[2]), row.split()[0].partition("|")[0]) for row in rows if row.strip()]
    before = [(start, word) for start, word in starts if start is not None and start <= began + CLOCK]
    return max(before)[1] if before else None


def requeue(job_id: str) -> None:
    """Back into the queue. Everything of the job is told to end, and killed some seconds later (KillWait)."""
    try:
        _run(["scontrol", "requeue", job_id])
    except SlurmRefused as error:
        if "pending execution" not in str(error):  # it is there already
            raise


def postpone(job_id: str, start: float) -> None:
    """Keep a pending job from starting before a unix time."""
    _run(["scontrol", "update", "JobId=" + job_id, "StartTime=" + _moment(start)])


def succeed(job_id: str, script: str, name: str, start: Optional[float], avoid: Sequence[str]) -> str:
    """Submit a script to start when the job has ended that runs it now; the new job's id.

    Args:
        name: of the job that runs now.
        start: not before this unix time.
        avoid: nodes that it may not get.
    """
    options = ["--parsable", "--dependency=afterany:" + job_id, "--job-name=" + name]
    options += ["--begin=" + _moment(start)] if start else []
    options += ["--exclude=" + ",".join(avoid)] if avoid else []
    more = {"MRL_SUCCEEDS": job_id, "MRL_PREPARED": os.path.dirname(script)}
    told = _run(["sbatch"] + options + [script], dict(_of_no_job(), **more))
    return told.strip().partition(";")[0]


def could_start(script: str, avoid: Sequence[str]) -> bool:
    """Whether there are enough nodes for a script without these, drained and down ones not counted. Nothing is
    submitted. That Slurm refuses the script for another reason, now or at all, says nothing about its nodes."""
    options = ["--test-only"] + (["--exclude=" + ",".join(avoid)] if avoid else [])
    try:
        _run(["sbatch"] + options + [script], _of_no_job())
    except SlurmSilent:
        raise
    except SlurmRefused as error:
        return _TOO_FEW.search(str(error)) is None
    return True


def _of_no_job() -> Dict[str, str]:
    """Our environment without what describes the job that we are in."""
    return {key: value for key, value in os.environ.items() if key in OF_ANY_JOB or not key.startswith(OF_THIS_JOB)}


def waiting_for(job_id: str, name: str) -> List[str]:
    """Ids of one's own jobs of a name that wait in the queue for another one to end."""
    mine = ["--user=" + str(os.getuid()), "--states=PENDING"]
    rows = _run(["squeue", "--noheader", "--format=%A %E", "--name=" + name] + mine).splitlines()
    asked = re.compile(r"\bafterany:{}\b".format(job_id))
    return [row.split()[0] for row in rows if asked.search(row)]


def exclude(job_id: str, hosts: Sequence[str]) -> None:
    """Keep a pending job away from these nodes, and from no others."""
    _run(["scontrol", "update", "JobId=" + job_id, "ExcNodeList=" + ",".join(hosts)])


def avoided(job: Dict[str, str]) -> List[str]:
    """Nodes that a job may not get.

    Args:
        job: its record.
    """
    listed = job.get("ExcNodeList", "")
    return [] if listed in ("", "(null)") else hostnames(listed)


def version() -> List[int]:
    """[22, 5, 8]; empty where it cannot be told."""
    try:
        return [int(part) for part in re.findall(r"\d+", _run(["scontrol", "--version"]))[:3]]
    except SlurmRefused:
        return []


def environment() -> Dict[str, str]:
    """Ours without what a user sets to shape the output of Slurm's commands."""
    shaping = ("SQUEUE_", "SACCT_", "SCONTROL_", "SCANCEL_", "SINFO_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(shaping)}
    return dict(kept, SLURM_TIME_FORMAT="standard", LC_ALL="C")


def _config() -> Dict[str, str]:
    found = re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", _run(["scontrol", "show", "config"]), re.MULTILINE)
    return dict(found)


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))


def _run(command: List[str], environ: Optional[Dict[str, str]] = None) -> str:
    asked = " ".join(command)
    try:
        done = subprocess.run(
            command,
            env=environ or environment(),
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
