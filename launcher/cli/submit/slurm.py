"""mrl-submit on a Slurm cluster: show, submit, or run inside an allocation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.show.submission import (
    dry_run_json,
    dry_run_lines,
    submitted_json,
    submitted_lines,
)
from launcher.cli.show.terminal import echo
from launcher.cli.submit.request import PlannedRun, Request
from launcher.cluster.profile import Profile
from launcher.errors import BadInput
from launcher.job.admission import check
from launcher.job.directories import disk_errors
from launcher.job.draft import Draft, draft
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_USAGE

if TYPE_CHECKING:
    from launcher.job.submit import SubmittedJob


def run_on_slurm(planned: Sequence[PlannedRun], request: Request, profile: Profile) -> int:
    if len(planned) > 1 and (request.follow or request.in_allocation):
        raise BadInput(f"a sweep of {len(planned)} jobs cannot be followed or run inside one allocation")
    if len(planned) == 1 and request.max_running is not None:
        raise BadInput("--max-running: only for sweeps, such as training.seed=1,2,3")
    drafts = [_draft(one, profile, request) for one in planned]
    if request.dry_run:
        for one, drafted in zip(planned, drafts, strict=True):
            for changed in check(one.recipe, drafted.job.run_dir, request.change):
                click.echo(f"change: {changed}", err=True)
        _show(drafts, request)
        return EXIT_USAGE if any(one.obstacles for one in drafts) else EXIT_FINISHED
    # What follows imports submitit, which is slow to import.
    if request.in_allocation:
        from launcher.cli.submit.allocation import run_in_allocation

        return run_in_allocation(drafts[0], planned[0].given, request.change)
    after = list(dict.fromkeys(_job_to_wait_for(text) for text in request.after))
    submitted = _submit_all(planned, drafts, after, request)
    if request.as_json:
        _print_json([submitted_json(one, drafted) for one, drafted in zip(submitted, drafts, strict=True)])
    elif len(planned) > 1:
        from launcher.runs.find import pasteable_command

        echo(f"compare:     {pasteable_command('compare', str(request.run_dir or planned[0].stem))}")
    if not request.follow or submitted[0].job_id is None:
        return EXIT_FINISHED
    from launcher.cli.submit.watch import watch

    return watch(submitted[0].run)


def _draft(planned: PlannedRun, profile: Profile, request: Request) -> Draft:
    cluster = str(planned.recipe.config.cluster)
    # Directly below the run root, which exists: Slurm opens the job's log there before the job starts.
    root = planned.given.absolute() if planned.given else Path(profile.run_root) / planned.name
    with disk_errors(root, "nothing was submitted"):
        return draft(planned.recipe, cluster, profile, root, request.update_code, request.change)


def _show(drafts: Sequence[Draft], request: Request) -> None:
    """Show the dry run: the script on stdout unless this is a sweep, everything else on stderr."""
    if request.as_json:
        _print_json([dry_run_json(one) for one in drafts])
        return
    if len(drafts) > 1 and request.script:
        raise BadInput(f"--script: this is a sweep of {len(drafts)} scripts; give each key one value, or use --json")
    if len(drafts) == 1:
        click.echo(drafts[0].script.encode(), nl=False)  # UTF-8, independent of the terminal
        parent = drafts[0].job.run_dir.parent
        if not parent.is_dir():
            click.echo(
                f"note: create {parent} before you sbatch this, because Slurm writes the job's log there", err=True
            )
    for drafted in drafts:
        for line in () if request.script else dry_run_lines(drafted):
            click.echo(line, err=True)
        for note in drafted.notes:
            click.echo(f"note: {note}", err=True)
        for obstacle in drafted.obstacles:
            click.echo(f"would be refused: {obstacle}", err=True)


def _job_to_wait_for(text: str) -> str:
    """Return the job id that --after means. Slurm must know it: it treats a dependency on an unknown job as
    fulfilled."""
    from launcher.backends.slurm.jobs import read_jobs
    from launcher.runs.find import find, is_run
    from launcher.runs.owner import job_id_of

    try:
        job_id = text if text.isdigit() and not is_run(text) else job_id_of(find(text))
    except BadInput as error:
        raise BadInput(f"--after {text}: {problem}" for problem in error.problems) from error
    if job_id is None:
        raise BadInput(f"--after {text}: this is a local run, which Slurm cannot wait for")
    job = read_jobs([job_id])[job_id]
    if job.kind == "gone":
        raise BadInput(f"--after {text}: Slurm does not know job {job_id}; leave --after out if the job ended long ago")
    return job_id


def _submit_all(
    planned: Sequence[PlannedRun], drafts: Sequence[Draft], after: Sequence[str], request: Request
) -> list[SubmittedJob]:
    """Submit the runs in turn. If Slurm refuses one of a sweep, those before it stay, and the error names the rest."""
    from launcher.job.code_sources import left_out
    from launcher.job.submit import refuse_unfit, submit
    from launcher.recipe.sweep import chains

    refuse_unfit(drafts)
    done: list[SubmittedJob] = []
    for one, drafted in zip(planned, drafts, strict=True):
        waits = [*after, *chains([before.job_id for before in done if before.job_id], request.max_running)]
        try:
            submitted = submit(
                drafted, given=one.given, change=request.change, after=waits, update_code=request.update_code
            )
        except BadInput as error:
            if not done:
                raise
            left = f"{len(done)} of {len(planned)} jobs are submitted (`mrl ls`), but not these:"
            names = [f"  {draft.job.run_dir.name}" for draft in drafts[len(done) :]]
            raise type(error)([*error.problems, "\n".join([left, *names])]) from error
        if submitted.fresh_code and not done and (note := left_out(submitted.run)):
            submitted = replace(submitted, notes=(*submitted.notes, note))
        done.append(submitted)
        if not request.as_json:
            for note in submitted.notes:
                echo(f"note: {note}", err=True)
            for line in submitted_lines(submitted, drafted, waits, brief=len(planned) > 1):
                echo(line)
    return done


def _print_json(records: Sequence[object]) -> None:
    """Print the object of one run, or those of a sweep."""
    click.echo(json.dumps(records[0] if len(records) == 1 else {"runs": records}))
