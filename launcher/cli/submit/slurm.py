"""mrl-submit on a Slurm cluster: show, estimate, submit, or run inside an allocation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from launcher.cli.show.job import describe, steps_in_words
from launcher.cli.submit.launch import Asked, Planned
from launcher.cluster.profile import Profile
from launcher.errors import BadInput
from launcher.job.draft import Draft, default_root, draft
from launcher.job.run_directory import check
from megatron_rl.contract.codes import EXIT_FINISHED


def run_there(planned: Sequence[Planned], asked: Asked, profile: Profile) -> int:
    """Returns the exit code. Raises BadInput."""
    if len(planned) > 1 and (asked.follow or asked.in_allocation):
        raise BadInput(f"a sweep of {len(planned)} jobs cannot be followed or run inside one allocation")
    if len(planned) == 1 and asked.max_running is not None:
        raise BadInput("--max-running: is for sweeps, such as training.seed=1,2,3")
    drafts = [_draft(one, profile, asked.update_code) for one in planned]
    if asked.dry_run or asked.test_only:
        for one, drafted in zip(planned, drafts, strict=True):
            check(one.recipe, drafted.job.run_dir, asked.change)
    if asked.dry_run:
        explain(drafts, asked)
        return EXIT_FINISHED
    # What follows talks to Slurm, through submitit, which is slow to import.
    if asked.in_allocation:
        from launcher.cli.submit.allocation import run_in_allocation

        return run_in_allocation(drafts[0], planned[0].given, asked.change)
    from launcher.cli.submit.slurm_submit import job_to_wait_for, record, say_estimates, submit_all

    after = list(dict.fromkeys(job_to_wait_for(text) for text in asked.after))
    if asked.test_only:
        say_estimates(drafts, after, asked)
        return EXIT_FINISHED
    submissions = submit_all(planned, drafts, after, asked)
    if asked.as_json:
        records = [record(one, drafted) for one, drafted in zip(submissions, drafts, strict=True)]
        click.echo(json.dumps(records[0] if len(records) == 1 else {"runs": records}))
    if not asked.follow or submissions[0].job_id is None:
        return EXIT_FINISHED
    from launcher.cli.submit.watch import watch

    return watch(submissions[0].run)


def _draft(planned: Planned, profile: Profile, update_code: bool) -> Draft:
    cluster = str(planned.recipe.config.cluster)
    root = planned.given.absolute() if planned.given else default_root(profile, planned.name)
    return draft(planned.recipe, cluster, profile, root, update_code)


def explain(drafts: Sequence[Draft], asked: Asked) -> None:
    """The dry run: the scripts on stdout; what they are about, below them, on stderr."""
    if asked.as_json:
        records = [_dry_record(one) for one in drafts]
        click.echo(json.dumps(records[0] if len(records) == 1 else {"runs": records}))
        return
    if len(drafts) > 1 and asked.script:
        raise BadInput(f"--script: this is a sweep of {len(drafts)} scripts; name one value a key, or use --json")
    for drafted in drafts if len(drafts) == 1 else ():
        click.echo(drafted.script, nl=False)
    for drafted in drafts:
        if not asked.script:
            click.echo(f"would submit to {drafted.job.cluster}: {describe(drafted.job)}", err=True)
            click.echo(f"  directory  {drafted.job.run_dir}", err=True)
            for line in steps_in_words(drafted.job.plan):
                click.echo(f"  {line}", err=True)
        for note in drafted.notes:
            click.echo(f"note: {note}", err=True)
        for obstacle in drafted.obstacles:
            click.echo(f"would be refused: {obstacle}", err=True)


def _dry_record(drafted: Draft) -> dict[str, Any]:
    job = drafted.job
    return {
        "cluster": job.cluster,
        "run_dir": str(job.run_dir),
        "plan": job.plan_json,
        "resolved": job.recipe.config.model_dump(mode="json"),
        "script": drafted.script,
        "notes": list(drafted.notes),
        "obstacles": list(drafted.obstacles),
    }
