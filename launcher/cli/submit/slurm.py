"""mrl-submit on a Slurm cluster: show, submit, or run inside an allocation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from launcher.cli.show.submission import (
    dry_run_json,
    dry_run_lines,
    submitted_json,
    submitted_lines,
)
from launcher.cli.show.terminal import echo
from launcher.cluster.profile import Profile
from launcher.errors import BadInput
from launcher.job.admission import check
from launcher.job.draft import Draft
from launcher.start.on_slurm import draft_of, submissions
from launcher.start.request import PlannedRun, Request
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_USAGE

if TYPE_CHECKING:
    from launcher.job.submit import SubmittedJob


def run_on_slurm(planned: Sequence[PlannedRun], request: Request, profile: Profile) -> int:
    if len(planned) > 1 and (request.follow or request.in_allocation):
        raise BadInput(f"a sweep of {len(planned)} jobs cannot be followed or run inside one allocation")
    if len(planned) == 1 and request.max_running is not None:
        raise BadInput("--max-running: only for sweeps, such as training.seed=1,2,3")
    drafts = [draft_of(one, profile, request) for one in planned]
    if request.dry_run:
        for one, drafted in zip(planned, drafts, strict=True):
            for changed in check(one.recipe, drafted.job.run_dir, request.change):
                click.echo(f"change: {changed}", err=True)
        _show(drafts, request)
        return EXIT_USAGE if any(one.obstacles for one in drafts) else EXIT_FINISHED
    if request.in_allocation:
        from launcher.cli.submit.allocation import run_in_allocation

        return run_in_allocation(drafts[0], planned[0].given, request.change)
    submitted = _submit_all(planned, drafts, request)
    if request.as_json:
        _print_json([submitted_json(one, drafted) for one, drafted in zip(submitted, drafts, strict=True)])
    elif len(planned) > 1:
        from launcher.runs.find import pasteable_command

        echo(f"compare:     {pasteable_command('compare', str(request.run_dir or planned[0].stem))}")
    if not request.follow or submitted[0].job_id is None:
        return EXIT_FINISHED
    from launcher.cli.submit.watch import watch

    return watch(submitted[0].run)


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


def _submit_all(planned: Sequence[PlannedRun], drafts: Sequence[Draft], request: Request) -> list[SubmittedJob]:
    """Submit the runs in turn and print a report of each."""
    done: list[SubmittedJob] = []
    for one in submissions(planned, drafts, request):
        done.append(one.job)
        if not request.as_json:
            for note in one.job.notes:
                echo(f"note: {note}", err=True)
            for line in submitted_lines(one.job, one.draft, one.waits, brief=len(planned) > 1):
                echo(line)
    return done


def _print_json(records: Sequence[object]) -> None:
    """Print the object of one run, or those of a sweep."""
    click.echo(json.dumps(records[0] if len(records) == 1 else {"runs": records}))
