"""Submission to Slurm by sbatch.

submitit's executor pickles a function, submits it with its own script, and waits for sbatch without a limit. Our script
is written already and must be what runs after every requeue, so nothing of submitit is used here; `launcher.api` offers
a run's job as one of submitit's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from launcher.host.slurm.call import NoSuchCommand, SlurmSilent, run, submitting_environment, unclear
from launcher.host.slurm.formats import id_of_job
from launcher.host.slurm.queries import text_of_script

SUBMIT_LIMIT_S = 120.0  # seconds; sbatch itself retries while the controller is busy
# Errors after which the controller may still accept the job.
_LATE = re.compile(r"timed out|zero bytes", re.IGNORECASE)


class SubmissionRefused(Exception):
    """sbatch refused the job; the text is its answer."""


def submit(script: Path, flags: Sequence[str] = ()) -> str:
    """Submit `script`. Returns the id of the job.

    Args:
        flags: options of sbatch.

    Raises:
        SubmissionRefused: nothing was submitted.
        OSError: nothing was submitted; the script cannot be read.
        SlurmSilent: sbatch did not answer in time, or without an id; there may be a job.
    """
    environ = submitting_environment(text_of_script(str(script)))
    command = ["sbatch", "--parsable", *flags, str(script)]
    try:
        answer = run(command, SUBMIT_LIMIT_S, environ)
    except NoSuchCommand as error:
        raise SubmissionRefused(str(error)) from error
    if answer.code != 0 and _LATE.search(answer.err):
        raise SlurmSilent(answer.err.strip())
    if answer.code != 0:
        raise SubmissionRefused(answer.err or answer.out)
    job_id = id_of_job(answer.out)
    if job_id is None:
        raise unclear(command, answer.out)
    return job_id
