"""Watch a run, across attempts, until it ends. Stopping does not affect the run."""

from __future__ import annotations

import time

from launcher.backends.slurm.jobs import JobState
from launcher.cli.show.ending import ending_lines
from launcher.cli.show.history import HistoryReader
from launcher.cli.show.progress_lines import ProgressLines
from launcher.cli.show.terminal import Interruptions, discard_output, echo
from launcher.errors import BadInput
from launcher.runs.find import pasteable_command
from launcher.runs.owner import job_id_of, read_job
from launcher.runs.state import UNSURE, RunStatus, last_line, read_status
from megatron_rl.contract.attempt_records import AttemptEnd
from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USAGE, MISCONFIGURED
from megatron_rl.contract.paths import RunDir

TICK = 0.3  # seconds between two reads of the run directory
ASK_EVERY_S = 5.0  # seconds between two questions to Slurm, whose controller many users share
LAG_S = 10.0  # seconds for the run directory to show an end that Slurm has reported

CODES = {"finished": EXIT_FINISHED, "stopped": EXIT_INTERRUPTED, "cancelled": EXIT_INTERRUPTED}


def watch(run: RunDir) -> int:
    job_id = job_id_of(run)
    interruptions = Interruptions()
    with interruptions.caught():
        status, reader = _until_the_end(run, job_id, interruptions)
    if interruptions.names:
        if interruptions.names[0] == "SIGHUP":
            discard_output()
        name = run.root.name
        offer = f"{pasteable_command('status', name)}, {pasteable_command('cancel --drain', name)}"
        echo(f"stopped watching; {f'job {job_id}' if job_id else name} continues. {offer}")
        return EXIT_INTERRUPTED
    return _report_end(status, reader)


def _until_the_end(run: RunDir, job_id: str | None, interruptions: Interruptions) -> tuple[RunStatus, HistoryReader]:
    asked_at, gone_at = float("-inf"), None
    shown: tuple[str, int, str] | None = None
    view = ProgressLines()
    job = JobState(job_id, "", "pending") if job_id else None
    status = read_status(run, job)
    reader = HistoryReader(run, run.attempt(status.attempt), status.steps)
    while True:
        now = time.monotonic()
        if now >= asked_at + ASK_EVERY_S:
            asked_at, job = now, _job_now(run, job)
        status = read_status(run, job)
        if status.attempt and status.attempt != reader.attempt.number:
            asked_at = float("-inf")
            reader = HistoryReader(run, run.attempt(status.attempt), status.steps)
        key = (status.state, status.attempt, status.waits_for)  # a reason may count the seconds
        text = _news(status)
        if key != shown and text:
            echo(text)
        shown = key
        history = reader.poll()
        if status.state in ("queued", "requeued"):
            history.phase = status.state
        view.show(history)
        if status.state == "finished" or interruptions.names:
            return status, reader
        if not status.alive:
            # The job may be over before the last lines of its record have crossed a network file system.
            gone_at = gone_at or now
            if now >= gone_at + LAG_S or status.state in ("failed", "stopped", "cancelled"):
                return status, reader
        else:
            gone_at = None
        time.sleep(TICK)


def _job_now(run: RunDir, job: JobState | None) -> JobState | None:
    """Ask Slurm for the run's job; return the last answer while the run's files do not say which job that is."""
    try:
        return read_job(run) or job
    except BadInput:
        return job


def _news(status: RunStatus) -> str:
    job = status.job
    if status.state in ("queued", "requeued") and job:
        waits = f", waiting for {status.waits_for}" if status.waits_for else ""
        why = f": {status.reason}" if status.reason else ""
        return f"job {job.job_id} is {status.state}{why}{waits}"
    if status.state in UNSURE:
        return f"{status.reason}; still watching the files of the run"
    if status.state == "saving":
        return f"saving ({status.reason})"
    if status.state == "running" and job and status.waits_for:  # its newest attempt is older than this start
        return f"job {job.job_id} has started on {job.nodes}, waiting for {status.waits_for}"
    if status.state == "running" and job and status.attempt:
        return f"job {job.job_id} runs on {job.nodes}, attempt {status.attempt}"
    return ""


def _report_end(status: RunStatus, reader: HistoryReader) -> int:
    run = status.run
    resume = pasteable_command("resume", run.root.name)
    last = last_line(run)
    of_job = status.job is None or (last is not None and last.job_id == status.job.job_id)
    end = last if isinstance(last, AttemptEnd) and of_job else None
    code = CODES.get(status.state, EXIT_CRASHED)
    if end is not None and end.outcome == MISCONFIGURED:
        code = EXIT_USAGE
    if end is None or status.state in ("cancelled", "lost"):
        lines = [f"{status.state}: {status.reason}", f"log: {run.batch_log}", f"resume:      {resume}"]
    else:
        lines = ending_lines(run, run.attempt(end.attempt), end, reader.history, resume)
    for line in lines:
        echo(line, err=code in (EXIT_CRASHED, EXIT_USAGE))
    return code
