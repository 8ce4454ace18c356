"""mrl-submit on a Slurm cluster, once it is meant: ask for an estimate, or submit, and say what became of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from launcher.backends.slurm.jobs import moment, read_jobs
from launcher.cli.show.job import describe
from launcher.cli.submit.launch import Asked, Planned
from launcher.errors import BadInput
from launcher.job.draft import Draft
from launcher.job.sources import heavy
from launcher.job.submit import Submission, estimate, submit
from launcher.recipe.sweep import chains
from launcher.runs.commands import mrl
from launcher.runs.find import find
from launcher.runs.state import job_id_of
from megatron_rl.contract.paths import RunDir
from megatron_rl.run_dir import read_json

FORESIGHT_S = 365 * 86400  # seconds: Slurm takes a job without a time limit for one of a year, and adds these up


def job_to_wait_for(text: str) -> str:
    """The job id that --after means, known to Slurm: it takes a dependency on a job that never was for fulfilled."""
    try:
        job_id = text if text.isdigit() else job_id_of(find(text))
    except BadInput as error:
        raise BadInput(f"--after {text}: {problem}" for problem in error.problems) from error
    if job_id is None:
        raise BadInput(f"--after {text}: is a local run, which Slurm cannot wait for")
    job = read_jobs([job_id])[job_id]
    if job.kind == "gone":
        raise BadInput(f"--after {text}: Slurm knows no job {job_id}; leave it out if it ended long ago")
    return job_id


def submit_all(
    planned: Sequence[Planned], drafts: Sequence[Draft], after: Sequence[str], asked: Asked
) -> list[Submission]:
    """One after the other; when Slurm takes one of a sweep no more, those before it stay and are named."""
    done: list[Submission] = []
    for one, drafted in zip(planned, drafts, strict=True):
        waits = [*after, *chains([str(before.job_id) for before in done if before.job_id], asked.max_running)]
        before = read_json(RunDir(drafted.job.run_dir).code_record)
        try:
            submission = submit(
                drafted, given=one.given, change=asked.change, after=waits, update_code=asked.update_code
            )
        except BadInput as error:
            if not done:
                raise
            left = f"{len(done)} of {len(planned)} jobs are submitted (`mrl ls`), these are not:"
            names = [f"  {draft.job.run_dir.name}" for draft in drafts[len(done) :]]
            raise type(error)([*error.problems, "\n".join([left, *names])]) from error
        if read_json(submission.run.code_record) != before and (note := heavy(submission.run.code)):
            submission = replace(submission, notes=(*submission.notes, note))
        done.append(submission)
        if not asked.as_json:
            _say(submission, drafted, waits, brief=len(planned) > 1)
    return done


def _say(submission: Submission, drafted: Draft, waits: Sequence[str], brief: bool) -> None:
    for note in submission.notes:
        click.echo(f"note: {note}", err=True)
    name = submission.run.root.name
    if submission.job_id is None:
        more = mrl("resume", name, "training.steps=N")
        click.echo(f"{submission.run.root}: already finished, nothing to do; more: {more}")
        return
    for change in submission.changes:
        click.echo(f"changed: {change}")
    waiting = f" after {' and '.join(waits)}" if waits else ""
    click.echo(f"submitted job {submission.job_id} to {drafted.job.cluster}{waiting}: {describe(drafted.job)}")
    if brief:
        click.echo(f"  {submission.run.root}")
        return
    click.echo(
        f"  directory  {submission.run.root}\n"
        f"  state      {mrl('status', name)}\n"
        f"  output     {mrl('logs -f', name)}\n"
        f"  stop       {mrl('cancel --drain', name)}"
    )


def record(submission: Submission, drafted: Draft) -> dict[str, Any]:
    return {
        "cluster": drafted.job.cluster,
        "run_dir": str(submission.run.root),
        "job_id": submission.job_id,
        "finished": submission.job_id is None,
        "changes": {one.key: [one.old, one.new] for one in submission.changes},
        "notes": list(submission.notes),
    }


def say_estimates(drafts: Sequence[Draft], after: Sequence[str], asked: Asked) -> None:
    records = []
    for drafted in drafts:
        start, nodes, partition = estimate(drafted, after)
        foreseen = (moment(start) or 0) < time.time() + FORESIGHT_S
        told = {"start": start if foreseen else None, "nodes": nodes, "partition": partition}
        records.append({"run_dir": str(drafted.job.run_dir), **told})
        if not asked.as_json and foreseen:
            where = f" on {nodes}" if nodes else ""
            click.echo(f"Slurm would start {describe(drafted.job)} at {start}{where}, partition {partition}")
        elif not asked.as_json:
            click.echo(
                f"Slurm would take {describe(drafted.job)}, partition {partition}, and cannot foresee when it would "
                "start: what runs before it has no time limit, or not enough nodes are up (sinfo)"
            )
    if asked.as_json:
        click.echo(json.dumps(records[0] if len(records) == 1 else {"runs": records}))
