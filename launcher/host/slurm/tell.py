"""What Slurm is told. Every order raises SlurmRefused where it was not taken."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from launcher.host.slurm.ask import jobs_called, step_called, steps_of, text_of_script
from launcher.host.slurm.call import SlurmRefused, call, submitting_environment, unclear
from launcher.host.slurm.formats import id_of_job, text_of
from megatron_rl.contract.codes import SUCCEEDS_VARIABLE


def signal_steps(job_id: str, name: str) -> None:
    """Send a signal to the steps of a job; its batch script does not get it."""
    call(["scancel", f"--signal={name}", job_id])


def signal_step(job_id: str, step: str, name: str) -> None:
    """Send a signal to the tasks of one step, if it runs.

    Args:
        step: its name, such as infer-0.
    """
    found = step_called(job_id, step)
    if found is not None:
        call(["scancel", f"--signal={name}", found])


def cancel(job_id: str) -> None:
    """End a job for good."""
    call(["scancel", job_id])


def cancel_waiting(job_id: str) -> None:
    """End a job for good, if it waits in the queue."""
    call(["scancel", "--state=PENDING", job_id])


def cancel_called(name: str) -> None:
    """End all of one's own jobs of a name for good, by their ids: scancel's own --name takes a name with a comma for
    two."""
    found = sorted(jobs_called(name))
    if found:
        call(["scancel", *found])


def submit_command(options: Sequence[str], command: Sequence[str], environment: dict[str, str]) -> str:
    """Submit a job that runs one command; its id."""
    asked = ["sbatch", "--parsable", *list(options), "--wrap=exec " + " ".join(map(shlex.quote, command))]
    return _id_of(asked, call(asked, environment))


def kill_steps(job_id: str) -> None:
    """End the steps of a job and leave its batch script alone."""
    steps = steps_of(job_id)
    if steps:
        call(["scancel", "--signal=KILL", *steps])


def requeue(job_id: str) -> None:
    """Send a job back into the queue. Everything of it is told to end, and killed some seconds later (KillWait)."""
    try:
        call(["scontrol", "requeue", job_id])
    except SlurmRefused as error:
        if "pending execution" not in str(error):  # it is there already
            raise


def forbid_requeue(job_id: str) -> None:
    """Have a job end for good when its script ends."""
    call(["scontrol", "update", "JobId=" + job_id, "Requeue=0"])


def postpone(job_id: str, start: float) -> None:
    """Keep a pending job from starting before a unix time."""
    call(["scontrol", "update", "JobId=" + job_id, "StartTime=" + text_of(start)])


def exclude(job_id: str, hosts: Sequence[str]) -> None:
    """Keep a pending job away from these nodes, and from no others."""
    call(["scontrol", "update", "JobId=" + job_id, "ExcNodeList=" + ",".join(hosts)])


def submit_successor(
    job_id: str,
    script: str,
    name: str,
    comment: str,
    start: float | None,
    avoid: Sequence[str],
    environment: dict[str, str],
) -> str:
    """Submit a script to start when the job has ended that runs it now; the new job's id.

    Args:
        name: of the job that runs now.
        comment: which run it is for.
        start: not before this unix time.
        avoid: nodes that it may not get.
        environment: variables that it is to have beside ours.
    """
    options = ["--parsable", "--dependency=afterany:" + job_id, "--job-name=" + name, "--comment=" + comment]
    options += ["--begin=" + text_of(start)] if start else []
    options += ["--exclude=" + ",".join(avoid)] if avoid else []
    command = ["sbatch", *options, script]
    inherited = submitting_environment(text_of_script(script))
    told = call(command, dict(inherited, **dict({SUCCEEDS_VARIABLE: job_id}, **environment)))
    return _id_of(command, told)


def _id_of(command: Sequence[str], told: str) -> str:
    """Of the job that sbatch --parsable tells of."""
    fresh = id_of_job(told)
    if fresh is None:
        raise unclear(command, told)
    return fresh
