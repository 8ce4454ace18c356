"""What is asked of Slurm. Nothing changes by it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from launcher.host.slurm.call import SlurmRefused, SlurmSilent, call, submitting_environment, unclear
from launcher.host.slurm.formats import CLOCK_S, expand_hosts, parse_config, parse_fields, time_of

KILL_WAIT_S = 30.0  # Slurm's default

# sbatch --test-only on a script that excludes more nodes than it can do without
_TOO_FEW = re.compile(r"configuration (is )?not available", re.IGNORECASE)


def show_job(job_id: str) -> dict[str, str]:
    """Slurm's record of one job. Raises SlurmRefused, also for a job that Slurm does not know."""
    command = ["scontrol", "show", "job", "-o", job_id]
    told = call(command)
    jobs = [parse_fields(record.strip()) for record in re.split(r"^(?=JobId=)", told, flags=re.MULTILINE)]
    for job in jobs:  # of an array: a record for each of its tasks
        if job.get("JobId") == job_id and "JobState" in job:
            return job
    raise unclear(command, told)


def is_completing(job_id: str) -> bool:
    """Whether a job is over but for what it has left on its nodes; not so where Slurm cannot be asked."""
    try:
        return show_job(job_id).get("JobState") == "COMPLETING"
    except SlurmRefused:
        return False


def node_states(hosts: Sequence[str]) -> dict[str, str]:
    """Node -> Slurm's word for it: `idle`, `allocated`, `down*`; the star: it does not answer. Raises SlurmRefused."""
    command = ["sinfo", "--all", "--noheader", "--Node", "--nodes=" + ",".join(hosts), "--format=%N %T"]
    told = call(command)
    lines = [line.split() for line in told.splitlines() if line.strip()]  # one for each of its partitions
    if any(len(line) != 2 for line in lines):
        raise unclear(command, told)
    return dict(lines)


def states_of_all(hosts: Sequence[str]) -> dict[str, str]:
    """As `node_states`, of nodes that there are. Raises SlurmSilent where the answer leaves one of them out."""
    states = node_states(hosts)
    missing = [host for host in hosts if host not in states]
    if missing:
        raise SlurmSilent("sinfo: no word of {}".format(",".join(missing)))
    return states


def avoided_nodes(job: dict[str, str]) -> list[str]:
    """Nodes that a job may not get. Raises SlurmSilent where its record does not say so in a way that can be read.

    Args:
        job: its record.
    """
    listed = job.get("ExcNodeList", "")
    try:
        return [] if listed in ("", "(null)") else expand_hosts(listed)
    except ValueError:
        raise SlurmSilent(f"ExcNodeList={listed}: no list of nodes") from None


def preemption_cancels(job: dict[str, str]) -> bool | None:
    """Whether a preemption ends this job for good: as the cluster has it, or because the job may not be requeued. None
    where Slurm does not say.

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
            shown = call(["scontrol", "show", "partition", "-o", job.get("Partition", "")])
            mode = parse_fields(shown.strip()).get("PreemptMode", mode)
        elif config.get("PreemptType") == "preempt/qos":
            named = "name=" + job.get("QOS", "")
            told = call(["sacctmgr", "-n", "-P", "show", "qos", named, "format=PreemptMode"]).strip()
            mode = mode if told in ("", "cluster") else told
    except SlurmRefused:
        return None
    return "CANCEL" in mode.upper()


def kill_wait() -> float:
    """Seconds between SIGTERM and SIGKILL at the end of a job."""
    try:
        found = re.match(r"\d+", _config().get("KillWait", ""))
    except SlurmRefused:
        found = None
    return float(found.group()) if found else KILL_WAIT_S


def ended_as(job_id: str, began: float) -> str | None:
    """Slurm's word for the end of what ran under this job id at a time, where there is accounting: a job that was
    requeued has one entry for each of its starts. None where it cannot be told."""
    try:
        rows = call(["sacct", "-n", "-P", "-X", "-D", "-j", job_id, "-o", "State,Start"]).splitlines()
    except SlurmRefused:
        return None
    starts = [(time_of(row.partition("|")[2]), row.split()[0].partition("|")[0]) for row in rows if row.strip()]
    before = [(start, word) for start, word in starts if start is not None and start <= began + CLOCK_S]
    return max(before)[1] if before else None


def could_start(script: str, avoid: Sequence[str]) -> bool:
    """Whether there are enough nodes for a script without these, drained and down ones not counted. Nothing is
    submitted. That Slurm refuses the script for another reason, now or at all, says nothing about its nodes. Raises
    SlurmSilent."""
    options = ["--test-only"] + (["--exclude=" + ",".join(avoid)] if avoid else [])
    try:
        call(["sbatch", *options, script], submitting_environment(text_of_script(script)))
    except SlurmSilent:
        raise
    except SlurmRefused as error:
        return _TOO_FEW.search(str(error)) is None
    return True


def text_of_script(script: str) -> str:
    """The text of a script; empty where it cannot be read: sbatch refuses that one itself."""
    try:
        with open(script, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def waiting_for(job_id: str, name: str) -> list[str]:
    """Ids of one's own jobs of a name that wait in the queue for another one to end. Raises SlurmRefused."""
    dependency = re.compile(rf"\bafterany:{job_id}\b")
    found = _mine(name, "%E", "--states=PENDING")
    return [job for job, waits in found.items() if dependency.search(waits)]


def partitions() -> list[str]:
    """Names of all partitions, hidden ones included. Raises SlurmRefused."""
    command = ["sinfo", "--all", "--noheader", "--format=%R"]
    told = call(command)
    names = sorted(set(told.split()))
    if not names:
        raise unclear(command, told)
    return names


def jobs_called(name: str) -> dict[str, str]:
    """Nodes of one's own jobs of a name that have not ended, by id; of one that waits, nothing. Raises SlurmRefused."""
    return _mine(name, "%N")


def steps_of(job_id: str) -> list[str]:
    """Ids of a job's steps, without those of Slurm itself, such as 7.batch. Raises SlurmRefused."""
    steps = call(["squeue", "--noheader", "--steps", "--jobs=" + job_id, "--format=%i"]).split()
    return [step for step in steps if step.rpartition(".")[2].isdigit()]


def step_called(job_id: str, name: str) -> str | None:
    """Id of the newest step of a job that has this name; None: none runs. Raises SlurmRefused."""
    rows = call(["squeue", "--noheader", "--steps", "--jobs=" + job_id, "--format=%i %j"]).splitlines()
    found = [row.split()[0] for row in rows if row.split()[1:] == [name]]
    return max(found, key=lambda step: int(step.rpartition(".")[2])) if found else None


def _mine(name: str, field: str, *options: str) -> dict[str, str]:
    """A field, as squeue's --format calls it, of one's own jobs of a name, by id. squeue's own --name takes a comma for
    one between two names. Raises SlurmRefused."""
    command = ["squeue", "--noheader", "--user=" + str(os.getuid()), f"--format=%A|{field}|%j"]
    rows = [line.split("|", 2) for line in call(command + list(options)).splitlines()]
    called = os.fsencode(name).decode("utf-8", "replace")  # as `call` reads it, whatever this host's locale
    return {row[0]: row[1] for row in rows if row[2:] == [called]}


def _config() -> dict[str, str]:
    return parse_config(call(["scontrol", "show", "config"]))
