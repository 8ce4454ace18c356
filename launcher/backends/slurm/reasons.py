"""Slurm's reasons for a job that waits, in plain words."""

from __future__ import annotations

import time
from typing import NamedTuple

from launcher.backends.slurm.jobs import JobState


class Wait(NamedTuple):
    what: str
    stuck: bool
    """Whether it waits for ever unless somebody acts."""


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

HELD = ("REQUEUE_HOLD", "SPECIAL_EXIT")
"""States of a job that waits for somebody to release it, whatever its reason."""


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
