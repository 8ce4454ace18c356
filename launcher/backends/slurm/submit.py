"""Submission to Slurm: submitit's executor with our script instead of its own, and sbatch's estimate of the start.

submitit's public interface submits a pickled function with a script of its own. Ours is written already and must be
what runs after every requeue, so `_submit_command`, a private hook of submitit, hands it to sbatch."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from shutil import which

from submitit import SlurmExecutor, SlurmJob
from submitit.helpers import CommandFunction

from launcher.host.slurm.call import NoSuchCommand, SlurmSilent, run, submitting_environment, unclear
from launcher.host.slurm.formats import id_of_job
from launcher.host.slurm.queries import text_of_script

SUBMIT_LIMIT_S = 120.0  # seconds; sbatch itself retries while the controller is busy
# Errors after which the controller may still accept the job.
_LATE = re.compile(r"timed out|zero bytes", re.IGNORECASE)

_ESTIMATE = re.compile(r"Job \d+ to start at (\S+) .*?(?:nodes (\S+))? in partition (\S+)")


class SubmissionRefused(Exception):
    """sbatch refused the job; the text is its answer."""


class ScriptExecutor(SlurmExecutor):
    """Submits an existing script; the function that submitit pickles never runs.

    Args:
        folder: folder for submitit's own files, which nothing reads after the submission.
        script: path of the sbatch script, in its run directory.
        flags: options of sbatch.
    """

    def __init__(self, folder: Path, script: Path, flags: Sequence[str]) -> None:
        super().__init__(folder)
        self._script = script
        self._command = ["sbatch", "--parsable", *flags, str(script)]
        self.job_id: str | None = None
        """Id of the job that Slurm accepted."""

    @classmethod
    def affinity(cls) -> int:
        """Whether sbatch is there; submitit looks for srun, which a submission does not need."""
        return -1 if which("sbatch") is None else 2

    def _submit_command(self, command: str) -> SlurmJob[str]:
        """Run sbatch with a time limit; submitit's own method prints its error and waits for ever."""
        # MRL_PREPARED: a node that does not see the run directory must not create another one from the script.
        environ = submitting_environment(text_of_script(str(self._script))) | {"MRL_PREPARED": str(self._script.parent)}
        try:
            answer = run(self._command, SUBMIT_LIMIT_S, environ)
        except NoSuchCommand as error:
            raise SubmissionRefused(str(error)) from error
        if answer.code != 0 and _LATE.search(answer.err):
            raise SlurmSilent(answer.err.strip())
        if answer.code != 0:
            raise SubmissionRefused(answer.err or answer.out)
        job_id = id_of_job(answer.out)
        if job_id is None:
            raise unclear(self._command, answer.out)
        self.job_id = job_id
        return SlurmJob(folder=self.folder, job_id=job_id, tasks=[0])


def submit(script: Path, flags: Sequence[str] = ()) -> str:
    """Submit `script`. Returns the id of the job.

    Raises:
        SubmissionRefused: nothing was submitted.
        OSError: nothing was submitted; the script cannot be read, or submitit's files cannot be written.
        SlurmSilent: sbatch did not answer in time, or without an id; there may be a job.
    """
    executor: ScriptExecutor | None = None
    try:
        with tempfile.TemporaryDirectory(prefix="mrl-submitit-") as folder:
            executor = ScriptExecutor(Path(folder), script, flags)
            return str(executor.submit(CommandFunction([])).job_id)
    except OSError:
        if executor is None or executor.job_id is None:
            raise
        return executor.job_id  # only submitit's files could not be moved or removed, after the submission


def estimate(script: Path, flags: Sequence[str] = ()) -> tuple[str, str, str]:
    """Slurm's own estimate for `script`: (start as it writes it, nodes, partition). Submits nothing.

    Raises:
        SubmissionRefused: Slurm would refuse the job.
        SlurmSilent: sbatch did not answer in time.
    """
    environ = submitting_environment(text_of_script(str(script)))
    answer = run(["sbatch", "--test-only", *flags, str(script)], SUBMIT_LIMIT_S, environ)
    found = _ESTIMATE.search(answer.err)
    if answer.code != 0 or not found:
        raise SubmissionRefused(answer.err or answer.out)
    return found[1], found[2] or "", found[3]
