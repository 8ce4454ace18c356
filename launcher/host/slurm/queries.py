"""Queries to Slurm: jobs, nodes, steps, partitions. None of them changes anything."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from launcher.host.slurm.call import SlurmRefused, SlurmSilent, call, submitting_environment, unclear
from launcher.host.slurm.formats import CLOCK_S, expand_hosts, parse_config, parse_fields, time_of
from megatron_rl.contract.text import whole_number

KILL_WAIT_S = 30.0  # Slurm's default

# sbatch --test-only on a script that excludes more nodes than it can do without
_TOO_FEW = re.compile(r"configuration (is )?not available", re.IGNORECASE)


def show_job(job_id: str) -> dict[str, str]:
    command = ["scontrol", "show", "job", "-o", job_id]
    answer = call(command)
    jobs = [parse_fields(record.strip()) for record in re.split(r"^(?=JobId=)", answer, flags=re.MULTILINE)]
    for job in jobs:  # an array has one record for each of its tasks
        if job.get("JobId") == job_id and "JobState" in job:
            return job
    raise unclear(command, answer)


def is_completing(job_id: str) -> bool:
    try:
        return show_job(job_id).get("JobState") == "COMPLETING"
    except SlurmRefused:
        return False


def node_states(hosts: Sequence[str]) -> dict[str, str]:
    """Node -> its state in Slurm's words: `idle`, `down*` (the star: it does not answer). Raises SlurmRefused."""
    command = ["sinfo", "--all", "--noheader", "--Node", "--nodes=" + ",".join(hosts), "--format=%N %T"]
    answer = call(command)
    lines = [line.split() for line in answer.splitlines() if line.strip()]  # a node has one for each partition
    if any(len(line) != 2 for line in lines):
        raise unclear(command, answer)
    return dict(lines)


def states_of_all(hosts: Sequence[str]) -> dict[str, str]:
    states = node_states(hosts)
    missing = [host for host in hosts if host not in states]
    if missing:
        raise SlurmSilent(f"sinfo: no word of {','.join(missing)}")
    return states


def avoided_nodes(job: dict[str, str]) -> list[str]:
    """Nodes that a job excludes, by its record. Raises SlurmSilent where the record cannot be parsed."""
    listed = job.get("ExcNodeList", "")
    try:
        return [] if listed in ("", "(null)") else expand_hosts(listed)
    except ValueError:
        raise SlurmSilent(f"ExcNodeList={listed}: no list of nodes") from None


def preemption_cancels(job: dict[str, str]) -> bool | None:
    """Whether the present preemption of a job cancels it instead of requeueing it; None where Slurm does not say."""
    if time_of(job.get("PreemptTime")) is None:
        return False  # not being preempted: save the controller a query
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
            of_qos = call(["sacctmgr", "-n", "-P", "show", "qos", named, "format=PreemptMode"]).strip()
            mode = mode if of_qos in ("", "cluster") else of_qos
    except SlurmRefused:
        return None
    return "CANCEL" in mode.upper()


def kill_wait() -> float:
    try:
        found = re.match(r"[0-9]{1,9}(?![0-9])", _config().get("KillWait", ""))
    except SlurmRefused:
        found = None
    return float(found.group()) if found else KILL_WAIT_S


def ended_as(job_id: str, began: float) -> str | None:
    """Accounting's state of the start of a job that ran at the time `began`: a requeued job has an entry for each of
    its starts. None where accounting does not know."""
    try:
        rows = call(["sacct", "-n", "-P", "-X", "-D", "-j", job_id, "-o", "State,Start"]).splitlines()
    except SlurmRefused:
        return None
    starts = [(time_of(row.partition("|")[2]), row.split()[0].partition("|")[0]) for row in rows if row.strip()]
    before = [(start, word) for start, word in starts if start is not None and start <= began + CLOCK_S]
    return max(before)[1] if before else None


def could_start(script: str, avoid: Sequence[str]) -> bool:
    """Whether enough nodes are left for a script that excludes `avoid`; drained and down nodes do not count. Submits
    nothing. A refusal for any other reason counts as yes. Raises SlurmSilent."""
    options = ["--test-only"] + (["--exclude=" + ",".join(avoid)] if avoid else [])
    try:
        call(["sbatch", *options, script], submitting_environment(text_of_script(script)))
    except SlurmSilent:
        raise
    except SlurmRefused as error:
        return _TOO_FEW.search(str(error)) is None
    return True


def text_of_script(script: str) -> str:
    try:
        with open(script, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def waiting_for(job_id: str, name: str) -> list[str]:
    """Ids of this user's jobs of a name that wait in the queue for job `job_id` to end. Raises SlurmRefused."""
    dependency = re.compile(rf"\bafterany:{job_id}\b")
    found = _mine(name, "%E", "--states=PENDING")
    return [job for job, waits in found.items() if dependency.search(waits)]


def partitions() -> list[str]:
    command = ["sinfo", "--all", "--noheader", "--format=%R"]
    answer = call(command)
    names = sorted(set(answer.split()))
    if not names:
        raise unclear(command, answer)
    return names


def jobs_called(name: str) -> dict[str, str]:
    """Id -> nodes, empty if pending, of this user's jobs of a name that have not ended. Raises SlurmRefused."""
    return _mine(name, "%N")


def steps_of(job_id: str) -> list[str]:
    steps = call(["squeue", "--noheader", "--steps", "--jobs=" + job_id, "--format=%i"]).split()
    return [step for step in steps if _number_of(step) is not None]


def step_called(job_id: str, name: str) -> str | None:
    rows = call(["squeue", "--noheader", "--steps", "--jobs=" + job_id, "--format=%i %j"]).splitlines()
    numbers = {row.split()[0]: _number_of(row.split()[0]) for row in rows if row.split()[1:] == [name]}
    found = {step: number for step, number in numbers.items() if number is not None}
    return max(found, key=found.__getitem__) if found else None


def _number_of(step: str) -> int | None:
    """Number of a step such as `4711.3`; None for the others, such as 4711.batch."""
    return whole_number(step.rpartition(".")[2])


def _mine(name: str, field: str, *options: str) -> dict[str, str]:
    """Id -> field (as squeue's --format names it) of this user's jobs of a name. squeue's own --name would split a name
    at its commas. Raises SlurmRefused."""
    command = ["squeue", "--noheader", "--user=" + str(os.getuid()), f"--format=%A|{field}|%j"]
    rows = [line.split("|", 2) for line in call(command + list(options)).splitlines()]
    called = os.fsencode(name).decode("utf-8", "replace")  # as `call` reads it, whatever this host's locale
    return {row[0]: row[1] for row in rows if row[2:] == [called]}


def _config() -> dict[str, str]:
    return parse_config(call(["scontrol", "show", "config"]))
