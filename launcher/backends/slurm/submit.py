"""Submission to Slurm: submitit's executor with our script in place of its own, and sbatch's own estimate."""

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

SUBMIT_LIMIT_S = 120.0  # sbatch itself tries again while the controller is busy
# The controller may have the request all the same, and take the job later.
_LATE = re.compile(r"timed out|zero bytes", re.IGNORECASE)

_ESTIMATE = re.compile(r"Job \d+ to start at (\S+) .*?(?:nodes (\S+))? in partition (\S+)")


class SubmissionRefused(Exception):
    """sbatch did not take the job; its text is what it answered."""


class ScriptExecutor(SlurmExecutor):
    """Submits a script that is already written; the function that submitit pickles is never run.

    Args:
        folder: for submitit's own files; nothing reads them once the job is submitted.
        script: path of the sbatch script, in its run directory.
        flags: of sbatch, in front of the script.
    """

    def __init__(self, folder: Path, script: Path, flags: Sequence[str]) -> None:
        super().__init__(folder)
        self._script = script
        self._command = ["sbatch", "--parsable", *flags, str(script)]
        self.job_id: str | None = None
        """Of the job, once Slurm has taken it."""

    @classmethod
    def affinity(cls) -> int:
        """submitit asks for srun, which submitting does not need."""
        return -1 if which("sbatch") is None else 2

    def _submit_command(self, command: str) -> SlurmJob[str]:
        """submitit's own prints sbatch's error, and waits for it for ever."""
        # A node that does not see the run directory must not make another one from the script.
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
    """Hand `script` to sbatch; the id of the job.

    Raises:
        SubmissionRefused: nothing was submitted.
        OSError: nothing was submitted; the script cannot be read, or submitit's files cannot be written.
        SlurmSilent: sbatch did not answer in time, or not with an id; whether there is a job is not known.
    """
    executor: ScriptExecutor | None = None
    try:
        with tempfile.TemporaryDirectory(prefix="mrl-submitit-") as folder:
            executor = ScriptExecutor(Path(folder), script, flags)
            return str(executor.submit(CommandFunction([])).job_id)
    except OSError:
        if executor is None or executor.job_id is None:
            raise
        return executor.job_id  # what failed comes after: files of submitit's are put away, and then removed


def estimate(script: Path, flags: Sequence[str] = ()) -> tuple[str, str, str]:
    """Slurm's own estimate for `script`: (start as it writes it, nodes, partition). Submits nothing.

    Raises:
        SubmissionRefused: Slurm would not take the job.
        SlurmSilent: sbatch did not answer in time.
    """
    environ = submitting_environment(text_of_script(str(script)))
    answer = run(["sbatch", "--test-only", *flags, str(script)], SUBMIT_LIMIT_S, environ)
    found = _ESTIMATE.search(answer.err)
    if answer.code != 0 or not found:
        raise SubmissionRefused(answer.err or answer.out)
    return found[1], found[2] or "", found[3]
