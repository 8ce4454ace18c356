"""Orders to Slurm: signal, cancel, requeue, submit. Each raises SlurmRefused where Slurm did not accept it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from launcher.host.slurm.call import SlurmRefused, call, submitting_environment, unclear
from launcher.host.slurm.formats import id_of_job, text_of
from launcher.host.slurm.queries import jobs_called, step_called, steps_of, text_of_script
from megatron_rl.contract.codes import SUCCEEDS_VARIABLE


class NotRequeueable(SlurmRefused):
    """The job may not be requeued (Requeue=0)."""


def signal_steps(job_id: str, name: str) -> None:
    call(["scancel", f"--signal={name}", job_id])


def signal_step(job_id: str, step: str, name: str) -> None:
    found = step_called(job_id, step)
    if found is not None:
        call(["scancel", f"--signal={name}", found])


def cancel(job_id: str) -> None:
    call(["scancel", job_id])


def cancel_waiting(job_id: str) -> None:
    call(["scancel", "--state=PENDING", job_id])


def cancel_called(name: str) -> None:
    """End this user's jobs of a name for good, by id: scancel's own --name would split it at its commas."""
    found = sorted(jobs_called(name))
    if found:
        call(["scancel", *found])


def submit_command(options: Sequence[str], command: Sequence[str], environment: dict[str, str]) -> str:
    return _submit(["sbatch", "--parsable", *options, "--wrap=exec " + shlex.join(command)], environment)


def kill_steps(job_id: str) -> None:
    steps = steps_of(job_id)
    if steps:
        call(["scancel", "--signal=KILL", *steps])


def requeue(job_id: str) -> None:
    """Send a job back into the queue. Its processes get SIGTERM, and SIGKILL after KillWait seconds. Raises
    NotRequeueable as well."""
    try:
        call(["scontrol", "requeue", job_id])
    except SlurmRefused as error:
        if "presently disabled" in str(error):
            raise NotRequeueable(str(error)) from None
        if "pending execution" not in str(error):  # it is there already
            raise


def forbid_requeue(job_id: str) -> None:
    call(["scontrol", "update", "JobId=" + job_id, "Requeue=0"])


def postpone(job_id: str, start: float) -> None:
    call(["scontrol", "update", "JobId=" + job_id, "StartTime=" + text_of(start)])


def exclude(job_id: str, hosts: Sequence[str]) -> None:
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
    """Submit a script again, to start when job `job_id`, which runs it now, has ended, and not before a unix time.
    Returns the new job's id."""
    options = ["--parsable", "--dependency=afterany:" + job_id, "--job-name=" + name, "--comment=" + comment]
    options += ["--begin=" + text_of(start)] if start else []
    options += ["--exclude=" + ",".join(avoid)] if avoid else []
    inherited = submitting_environment(text_of_script(script))
    return _submit(["sbatch", *options, script], {**inherited, SUCCEEDS_VARIABLE: job_id, **environment})


def _submit(command: Sequence[str], environment: dict[str, str]) -> str:
    answer = call(command, environment)
    job_id = id_of_job(answer)
    if job_id is None:
        raise unclear(command, answer)
    return job_id
