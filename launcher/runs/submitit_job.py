"""The present job of a run as a `Job` of submitit: a Slurm job, or the attempt on this machine.

A run outlives its jobs: one that is requeued keeps its id, while a resumed run or one with a successor gets another. So
the id is read again from the run's record at each use. submitit's own jobs ask sacct, which many clusters lack, and
look for a pickled result; these ask squeue, then sacct, and the run's record.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from submitit import LocalJob, SlurmJob
from submitit.core.core import InfoWatcher
from submitit.core.utils import JobPaths, UncompletedJobError

from launcher.backends.slurm.jobs import read_jobs
from launcher.errors import Failed
from launcher.runs.control import cancel
from launcher.runs.failure import failure_of_run
from launcher.runs.owner import job_id_of
from launcher.runs.state import ALIVE, RunStatus, last_line, line_of, read_statuses, result_file
from launcher.runs.step_record import rows_of
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart
from megatron_rl.contract.codes import CRASHED, MISCONFIGURED
from megatron_rl.contract.evaluation_records import EvaluationResult
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import ABSENT, Unreadable, read
from megatron_rl.contract.shapes import to_json

ASK_EVERY_S = 5.0
"""Seconds between two questions of `done` to Slurm, whose controller many users share."""
LOOK_EVERY_S = 0.2
"""Seconds between two looks at the files of a local run."""

LOCAL_STATES = {"finished": "FINISHED", "stopped": "INTERRUPTED", "failed": "FINISHED", "lost": "INTERRUPTED"}
"""State of a local run that has ended -> the state that submitit's LocalJob has: FINISHED, with any result, or killed
by a signal."""


class SlurmWatcher(InfoWatcher):
    """Watcher of all jobs of a process, which asks squeue, and sacct for those that squeue no longer lists."""

    def update(self) -> None:
        self._num_calls += 1
        for job_id, job in read_jobs(sorted(self._registered)).items():
            if job.kind != "unknown":  # keeps the last answer while Slurm is silent
                self._info_dict[job_id] = {"JobID": job_id, "State": job.word or "UNKNOWN", "NodeList": job.nodes}
        self._last_status_check = time.time()

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return str(self.get_info(job_id, mode=mode).get("State") or "UNKNOWN")


class RunPaths(JobPaths):
    """Paths of a run's job: the output of the batch script, or of the first rank of a local run. Both streams are in
    one file, so there is no other one for stderr."""

    def __init__(self, run: RunDir, job_id: str, log: Path) -> None:
        super().__init__(run.root, job_id, 0)
        self._log = log

    @property
    def stdout(self) -> Path:
        return self._log


class _JobOfRun:
    """Answers of a job of submitit, from the run's own record."""

    run: RunDir
    _every_s = ASK_EVERY_S
    _asked: tuple[float, RunStatus] | None = None

    @property
    def job_id(self) -> str:
        raise NotImplementedError

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.run, self.job_id, self._log())

    def _log(self) -> Path:
        raise NotImplementedError

    def done(self, force_check: bool = False) -> bool:
        """Whether the run has ended: a job that is requeued has not. Asks Slurm at most every ASK_EVERY_S seconds,
        unless `force_check` is True."""
        now = time.monotonic()
        if self._asked is None or force_check or now >= self._asked[0] + self._every_s:
            self._asked = now, self._status()
        return self._asked[1].state not in ALIVE

    def cancel(self, check: bool = True) -> None:
        """End the run without saving, as `mrl cancel` does; `Run.cancel` saves first. Raises Failed where that fails,
        unless `check` is False."""
        try:
            status = self._status()
            if status.alive:
                cancel(status, drain=False)
        except Failed:
            if check:
                raise

    def submission(self) -> Any:
        raise UncompletedJobError(f"{self.run.root}: a run is a script, and pickles no function")

    def _status(self) -> RunStatus:
        (status,) = read_statuses([self.run])
        return status

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        """Return ("success", result) or ("error", end of the traceback or log), from which submitit's `results`,
        `result` and `exception` are made. Raises UncompletedJobError for a run that ended in another way."""
        status, end = self._status(), last_line(self.run)
        if status.state == "finished":
            return "success", result_of_run(self.run)
        failure = failure_of_run(self.run)
        if failure is not None and isinstance(end, AttemptEnd) and end.outcome in (CRASHED, MISCONFIGURED):
            return "error", "\n".join([failure.message, *failure.shown])
        raise UncompletedJobError(f"{self.run.root} is {status.state}: {status.reason}")


class SlurmJobOfRun(_JobOfRun, SlurmJob):
    """Present job of a run on a Slurm cluster. `state` is Slurm's: PENDING, RUNNING, COMPLETED, ..."""

    watcher = SlurmWatcher()

    def __init__(self, run: RunDir) -> None:
        self.run = run
        SlurmJob.__init__(self, run.root, self.job_id)

    @property
    def job_id(self) -> str:
        return str(job_id_of(self.run))

    def _log(self) -> Path:
        return self.run.batch_log


class LocalJobOfRun(_JobOfRun, LocalJob):
    """Present attempt of a run on this machine; its id is that of the supervisor's process. `state` is submitit's:
    RUNNING, FINISHED, or INTERRUPTED for a run that was stopped or killed."""

    _every_s = LOOK_EVERY_S

    def __init__(self, run: RunDir) -> None:
        self.run = run
        LocalJob.__init__(self, run.root, self.job_id)

    @property
    def job_id(self) -> str:
        began = line_of(self.run, self.run.last_attempt(), AttemptStart)
        return str(began.pid if began else None)

    def _log(self) -> Path:
        return self.run.attempt(self.run.last_attempt()).log(0)

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """Return {"jobState": ...}. `mode` has no effect: files are read each time."""
        status = self._status()
        return {"jobState": "RUNNING" if status.alive else LOCAL_STATES.get(status.state, "UNKNOWN")}

    def __del__(self) -> None:
        if self._cancel_at_deletion:
            self.cancel(check=False)


def job_of_run(run: RunDir) -> SlurmJobOfRun | LocalJobOfRun:
    """Return the present job of a run. Raises BadInput where the record of its job cannot be read."""
    return LocalJobOfRun(run) if job_id_of(run) is None else SlurmJobOfRun(run)


def result_of_run(run: RunDir) -> dict[str, Any]:
    """Return the result of a finished run: the row of its last step, or the result of a job that evaluates. Raises
    Failed where it cannot be read."""
    file = result_file(run)
    if file is None:
        rows = rows_of(run.metrics)
        if not rows:
            raise Failed(f"{run.root.name} has not finished a step yet: {run.metrics} does not exist or is empty")
        return rows[-1]
    found = read(EvaluationResult, file)
    if found is ABSENT:
        raise Failed(f"{run.root.name} has no result yet: {file} does not exist")
    if isinstance(found, Unreadable):
        raise Failed(str(found))
    return to_json(found)
