"""Watch a Slurm run: what it waits for, then its steps, across attempts, until it ends. Watching owns nothing."""

from __future__ import annotations

import time

import click

from launcher.backends.slurm.jobs import JobState, read_jobs
from launcher.cli.show.ending import account
from launcher.cli.show.panel import View, choose_view
from launcher.cli.show.progress import Reader
from launcher.cli.submit.follow import Interruptions, mute
from launcher.errors import BadInput
from launcher.runs.commands import mrl
from launcher.runs.state import Standing, job_id_of, look
from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USAGE
from megatron_rl.contract.paths import RunDir
from megatron_rl.run_dir import read_json_lines

TICK = 0.3  # seconds between looks at the run directory
ASK_EVERY_S = 5.0  # seconds between questions to Slurm: many people ask the same controller
SETTLE_S = 10.0  # seconds that the run directory has to show an end that Slurm has told

CODES = {"finished": EXIT_FINISHED, "stopped": EXIT_INTERRUPTED, "cancelled": EXIT_INTERRUPTED}


def watch(run: RunDir) -> int:
    """Until the run ends or Ctrl-C; returns the exit code of mrl-submit."""
    job_id = job_id_of(run)
    if job_id is None:
        raise BadInput(f"{run.root}: is a local run")
    view = choose_view(run.root.name)
    interruptions = Interruptions()
    try:
        with interruptions.caught():
            standing, reader = _until_the_end(run, job_id, view, interruptions)
    finally:
        view.close()
    if interruptions.names:
        if interruptions.names[0] == "SIGHUP":
            mute()
        name = run.root.name
        offer = f"{mrl('status', name)}, {mrl('cancel --drain', name)}"
        click.echo(f"stopped watching; job {job_id} goes on. {offer}")
        return EXIT_INTERRUPTED
    return _say_end(standing, reader)


def _until_the_end(run: RunDir, job_id: str, view: View, interruptions: Interruptions) -> tuple[Standing, Reader]:
    asked_at, gone_at = float("-inf"), None
    said: tuple[str, int, str] | None = None
    job = JobState(job_id, "", "pending")
    reader = Reader(run, run.attempt(run.last_attempt()), look(run, job).steps)
    while True:
        now = time.monotonic()
        if now >= asked_at + ASK_EVERY_S or run.last_attempt() != reader.attempt.number:
            asked_at, job = now, read_jobs([job_id])[job_id]
        standing = look(run, job)
        if standing.attempt and standing.attempt != reader.attempt.number:
            reader = Reader(run, run.attempt(standing.attempt), standing.steps)
        key = (standing.state, standing.attempt, standing.waits_for)  # a reason may count the seconds
        text = _in_words(standing)
        if key != said and text:
            view.say(text)
        said = key
        status = reader.poll()
        if standing.state in ("queued", "requeued"):
            status.phase = standing.state
        view.show(status)
        if standing.state == "finished" or interruptions.names:
            return standing, reader
        if not standing.alive:
            # The job may be over before the last lines of its record have crossed a network file system.
            gone_at = gone_at or now
            if now >= gone_at + SETTLE_S or standing.state in ("failed", "stopped", "cancelled"):
                return standing, reader
        else:
            gone_at = None
        time.sleep(TICK)


def _in_words(standing: Standing) -> str:
    job = standing.job
    if standing.state in ("queued", "requeued") and job:
        waits = f", waits for {standing.waits_for}" if standing.waits_for else ""
        why = f": {standing.reason}" if standing.reason else ""
        return f"job {job.job_id} is {standing.state}{why}{waits}"
    if standing.state == "unknown":
        return f"{standing.reason}; still watching the files of the run"
    if standing.state == "saving":
        return f"saving ({standing.reason})"
    if standing.state == "running" and job and standing.attempt:
        return f"job {job.job_id} runs on {job.nodes}, attempt {standing.attempt}"
    return ""


def _say_end(standing: Standing, reader: Reader) -> int:
    run = standing.run
    resume = mrl("resume", run.root.name)
    ends = [line for line in read_json_lines(run.attempts_ledger) if line["event"] == "end"]
    mine = [line for line in ends if standing.job and line.get("job_id") == standing.job.job_id]
    code = CODES.get(standing.state, EXIT_CRASHED)
    if mine and mine[-1]["outcome"] == "misconfigured":
        code = EXIT_USAGE
    if not mine or standing.state in ("cancelled", "lost"):
        lines = [f"{standing.state}: {standing.reason}", f"log: {run.batch_log}", f"resume:      {resume}"]
    else:
        lines = account(run, run.attempt(mine[-1]["attempt"]), mine[-1], reader.status, resume)
    for line in lines:
        click.echo(line, err=code in (EXIT_CRASHED, EXIT_USAGE))
    return code
