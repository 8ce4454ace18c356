"""Slurm's reasons in plain words: why a job waits, and why sbatch refused one."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from launcher.backends.slurm.jobs import JobState


class Wait(NamedTuple):
    what: str
    stuck: bool  # whether it waits for ever unless somebody acts


WAITS = {
    "": "the scheduler's next look at it",
    "Priority": "jobs of higher priority",
    "Resources": "free nodes",
    "Licenses": "a licence",
    "Reservation": "its reservation to begin",
    "Cleaning": "its earlier attempt to be cleaned up",
    "Prolog": "the nodes' prolog",
    "NodeDown": "a node that is down",
    "Nodes required for job are DOWN": "nodes that are down, drained or reserved",
    "ReqNodeNotAvail": "nodes that are down, drained or reserved",
    "PartitionDown": "its partition to be opened again",
    "PartitionInactive": "its partition to be opened again",
    "JobArrayTaskLimit": "others of its array",
    "MaxMemPerLimit": "memory within the limits",
}
"""Reasons that pass by themselves."""

STUCK = {
    "JobHeldUser": "it is held: scontrol release {id}",
    "JobHeldAdmin": "it is held by an administrator",
    "JobHoldMaxRequeue": "it was requeued too often (MaxBatchRequeue): scontrol release {id}",
    "job requeued in held state": "it was requeued and is held (scontrol requeuehold): scontrol release {id}",
    "job requeued in special exit state": "it was requeued and is held as a special exit: scontrol release {id}",
    "launch failed requeued held": "its start failed and it is held; see slurmd's log, then scontrol release {id}",
    "launch failure limit exceeded requeued held": (
        "Slurm has requeued it by itself too often (MaxBatchRequeue) and holds it; see slurmd's log, then scontrol "
        "release {id}"
    ),
    "user env retrieval failed requeued held": (
        "its node could not read your login environment and it is held; scontrol release {id}"
    ),
    "PartitionNodeLimit": "it asks for more nodes than its partition ever gives",
    "PartitionTimeLimit": "its time limit is above that of its partition",
    "PartitionConfig": "its partition cannot give what it asks for",
    "BadConstraints": "no node has what it asks for",
    "DependencyNeverSatisfied": "what it depends on will never come true: mrl cancel {id}",
    "InvalidAccount": "its account is not valid any more",
    "InvalidQOS": "its QOS is not valid any more",
    "AccountNotAllowed": "its account may not use this partition",
    "QOSNotAllowed": "its QOS may not use this partition",
    "DeadLine": "its deadline cannot be met",
}
"""Reasons that stay until somebody acts."""

HELD = ("REQUEUE_HOLD", "SPECIAL_EXIT")  # states of a job that waits for somebody to release it, whatever its reason


def wait_of(job: JobState) -> Wait:
    """Condition that a pending job waits for; an unknown reason is shown as Slurm names it."""
    if job.reason == "Dependency":
        return Wait(_dependency(job.dependency), False)
    if job.reason == "BeginTime":
        at = time.strftime("%H:%M:%S", time.localtime(job.eligible_at)) if job.eligible_at else "later"
        return Wait(at + (" (every requeue waits a while)" if job.restarts else ""), False)
    for known, text in STUCK.items():
        if job.reason.replace("_", " ").startswith(known):
            return Wait(text.format(id=job.job_id), True)
    for known, text in WAITS.items():
        if known and job.reason.replace("_", " ").lstrip("(").startswith(known):
            return Wait(text, False)
    if job.word in HELD:
        return Wait(f"it is held (Slurm's reason {job.reason or 'is not given'}): scontrol release {job.job_id}", True)
    if job.reason.startswith(("QOS", "Assoc")):
        return Wait(f"a limit of your {'QOS' if job.reason.startswith('QOS') else 'account'} ({job.reason})", False)
    return Wait(WAITS[""] if not job.reason else f"Slurm's reason {job.reason}", False)


def _dependency(text: str) -> str:
    """`afterany:1(unfulfilled),afterany:2(unfulfilled)` -> `job 1 and job 2 to end`."""
    if text.startswith("singleton"):
        return "the job before it to end"
    jobs = [part.rpartition(":")[2].partition("(")[0] for part in text.split(",") if part]
    return f"{' and '.join(f'job {job}' for job in jobs)} to end" if jobs else "other jobs to end"


NOISE = re.compile(r"^(sbatch|slurm_[a-z_]+)( error)?: (error: )?(fatal: )?")
HEADLINE = re.compile(r"^(Batch job submission failed|allocation failure): ")

ADVICE = {
    r"invalid partition": "this cluster has no partition {partition}; `sinfo -s` lists them",
    r"invalid account|association": (
        "account {account} is not yours on partition {partition}; `sacctmgr show assoc user=$USER` lists yours"
    ),
    r"invalid qos": "qos {qos} is not for this account or partition; `sacctmgr show qos format=name` lists them",
    r"violates accounting|QOS\w*Limit|Assoc\w*Limit": (
        "a limit of your account or QOS does not allow this job: fewer nodes, a shorter job.time_limit or fewer jobs "
        "at once; `mrl doctor` shows the limits"
    ),
    r"--time specification": "time limit {time} is not one that Slurm reads, such as 4:00:00 or 1-00:00:00",
    r"time limit": "time limit {time} is more than partition {partition} allows; `sinfo -o '%P %l'` shows how much",
    r"more processors|node count|node configuration": (
        "partition {partition} has no {nodes} nodes with {gpus-per-node} GPUs each; check job.nodes, gpus_per_node and "
        "gres against `sinfo -o '%P %D %G'`"
    ),
    r"memory specification": "no node has the memory that --mem asks for",
    r"invalid feature": "no node has the feature {constraint} (constraint); `sinfo -o '%N %f'` lists them",
    r"reservation": "you may use no reservation {reservation} now; see `scontrol show reservation`",
    r"invalid node name": "a node that the profile's sbatch flags name does not exist",
    r"(unrecognized|invalid|unknown|ambiguous) option": "this sbatch does not know one of the profile's sbatch flags",
    r"dependency": "--after: Slurm does not accept {dependency}",
    r"access denied|permission denied": "you may not submit to partition {partition}",
    r"unable to contact|connect failure|timed out|zero bytes": "Slurm's controller does not answer; try again later",
    r"process configuration file|cannot stat file|ClusterName needs": (
        "Slurm is not set up on this machine; is it a login node, and SLURM_CONF right?"
    ),
}
"""Pattern of sbatch's error (22.05 and later) -> what to do; {name} is the value of that option of the job."""


class _Request(dict[str, str]):
    def __missing__(self, option: str) -> str:
        return "(none given)"


def translate(said: str, request: Mapping[str, str]) -> str:
    """One line for a job that sbatch refused: what to change, and Slurm's own lines, each once.

    Args:
        said: sbatch's stderr.
        request: long option of sbatch -> value, of the refused job.
    """
    lines = [HEADLINE.sub("", NOISE.sub("", line.strip())).rstrip(".") for line in said.splitlines()]
    lines = [line for line in dict.fromkeys(lines) if line and not line.startswith("Try ")]
    reason = "; ".join(lines) or "no reason given"
    for pattern, advice in ADVICE.items():
        if re.search(pattern, said, re.IGNORECASE):
            return f"{advice.format_map(_Request(request))} (sbatch: {reason})"
    return f"sbatch refused the job: {reason}"


def no_partition(name: str, partitions: Collection[str]) -> tuple[str, str | None]:
    """Message about an unknown partition that lists the known ones, and a suggestion of a similar name."""
    names = sorted(partitions)
    close = difflib.get_close_matches(name, names, n=1)
    text = f"there is none called {name}; there are: {', '.join(names) or 'none that you may see'}"
    return text, f"did you mean {close[0]}?" if close else None
