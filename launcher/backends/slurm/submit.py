"""Submission to Slurm: submitit's executor with our script in place of its own, and sbatch's own estimate."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from shutil import which

from submitit import SlurmExecutor, SlurmJob
from submitit.helpers import CommandFunction

from launcher.host.slurm.call import OF_ANY_JOB, NoSuchCommand, SlurmSilent, run

SUBMIT_LIMIT_S = 120.0  # sbatch itself tries again while the controller is busy
DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
}
"""Of the user's shell: what their jobs go by where they say nothing else -> option of sbatch."""

_OPTION = re.compile(r"^#SBATCH --([a-z-]+)", re.MULTILINE)

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

    @classmethod
    def affinity(cls) -> int:
        """submitit asks for srun, which submitting does not need."""
        return -1 if which("sbatch") is None else 2

    def _submit_command(self, command: str) -> SlurmJob[str]:
        """submitit's own prints sbatch's error, and waits for it for ever."""
        # A node that does not see the run directory must not make another one from the script.
        prepared = {"MRL_PREPARED": str(self._script.parent)}
        try:
            answer = run(self._command, SUBMIT_LIMIT_S, submitting_environment(self._script) | prepared)
        except NoSuchCommand as error:
            raise SubmissionRefused(str(error)) from error
        if answer.code != 0 and _LATE.search(answer.err):
            raise SlurmSilent(answer.err.strip())
        job_id = answer.out.strip().rpartition("\n")[2].partition(";")[0]  # "4711" or "4711;cluster"
        if answer.code != 0 or not job_id.isdigit():
            raise SubmissionRefused(answer.err or answer.out)
        return SlurmJob(folder=self.folder, job_id=job_id, tasks=[0])


def submit(script: Path, flags: Sequence[str] = ()) -> SlurmJob[str]:
    """Hand `script` to sbatch; the job has `job_id` and `cancel`.

    Raises:
        SubmissionRefused: nothing was submitted.
        SlurmSilent: sbatch did not answer in time; whether there is a job is not known.
    """
    with tempfile.TemporaryDirectory(prefix="mrl-submitit-") as folder:
        return ScriptExecutor(Path(folder), script, flags).submit(CommandFunction([]))


def estimate(script: Path, flags: Sequence[str] = ()) -> tuple[str, str, str]:
    """Slurm's own estimate for `script`: (start as it writes it, nodes, partition). Submits nothing.

    Raises:
        SubmissionRefused: Slurm would not take the job.
        SlurmSilent: sbatch did not answer in time.
    """
    answer = run(["sbatch", "--test-only", *flags, str(script)], SUBMIT_LIMIT_S, submitting_environment(script))
    found = _ESTIMATE.search(answer.err)
    if answer.code != 0 or not found:
        raise SubmissionRefused(answer.err or answer.out)
    return found[1], found[2] or "", found[3]


def submitting_environment(script: Path) -> dict[str, str]:
    """Ours, which the job inherits, without what describes the job that we may be in ourselves, and without SBATCH_*:
    to sbatch these count for more than the script does."""
    given = _OPTION.findall(script.read_text(encoding="utf-8"))
    kept = {name for name, option in DEFAULTS.items() if option not in given}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SBATCH_") or name in kept}
    if "SLURM_JOB_ID" not in environ:
        return environ
    return {name: value for name, value in environ.items() if not name.startswith("SLURM_") or name in OF_ANY_JOB}
