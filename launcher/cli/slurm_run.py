"""mrl-submit on a Slurm cluster: show, estimate, submit, or run inside an allocation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from launcher.cli.launch import Asked, Planned
from launcher.errors import BadInput
from launcher.placement import Plan
from launcher.preparation import check
from launcher.profiles import Profile
from launcher.script import Job
from launcher.submission import Draft, Submission, default_root, draft, estimate, submit
from launcher.sweep import chains
from megatron_rl.run_dir import EXIT_FINISHED


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
    after = [_job_to_wait_for(text) for text in asked.after]
    if asked.dry_run:
        explain(drafts, asked)
        return EXIT_FINISHED
    if asked.test_only:
        _say_estimates(drafts, after, asked)
        return EXIT_FINISHED
    if asked.in_allocation:
        from launcher.cli.in_allocation import run_in_allocation

        return run_in_allocation(drafts[0], planned[0].given, asked.change)
    submissions = _submit_all(planned, drafts, after, asked)
    if asked.as_json:
        records = [_record(one, drafted) for one, drafted in zip(submissions, drafts, strict=True)]
        click.echo(json.dumps(records[0] if len(records) == 1 else {"runs": records}))
    if not asked.follow or submissions[0].job_id is None:
        return EXIT_FINISHED
    from launcher.cli.watch import watch

    return watch(submissions[0].run)


def _draft(planned: Planned, profile: Profile, update_code: bool) -> Draft:
    cluster = str(planned.recipe.config.cluster)
    root = planned.given.absolute() if planned.given else default_root(profile, planned.name)
    return draft(planned.recipe, cluster, profile, root, update_code)


def _job_to_wait_for(text: str) -> str:
    """The job id that --after means, known to Slurm: it takes a dependency on a job that never was for fulfilled."""
    from launcher.backends.slurm_state import read_jobs
    from launcher.runs import find
    from launcher.standing import job_id_of

    job_id = text if text.isdigit() else job_id_of(find(text))
    if job_id is None:
        raise BadInput(f"--after {text}: is a local run, which Slurm cannot wait for")
    job = read_jobs([job_id])[job_id]
    if job.kind == "gone":
        raise BadInput(f"--after {text}: Slurm knows no job {job_id}; leave it out if it ended long ago")
    return job_id


def _submit_all(
    planned: Sequence[Planned], drafts: Sequence[Draft], after: Sequence[str], asked: Asked
) -> list[Submission]:
    """One after the other; when Slurm takes one of a sweep no more, those before it stay and are named."""
    done: list[Submission] = []
    for one, drafted in zip(planned, drafts, strict=True):
        waits = [*after, *chains([str(before.job_id) for before in done if before.job_id], asked.max_running)]
        try:
            submission = submit(
                drafted, given=one.given, change=asked.change, after=waits, update_code=asked.update_code
            )
        except BadInput as error:
            if not done:
                raise
            left = f"{len(done)} of {len(planned)} jobs are submitted (`mrl ls`), these are not:"
            names = [f"  {draft.job.run_dir.name}" for draft in drafts[len(done) :]]
            raise BadInput([*error.problems, "\n".join([left, *names])]) from error
        done.append(submission)
        if not asked.as_json:
            _say(submission, drafted, waits, brief=len(planned) > 1)
    return done


def _say(submission: Submission, drafted: Draft, waits: Sequence[str], brief: bool) -> None:
    for note in submission.notes:
        click.echo(f"note: {note}", err=True)
    name = submission.run.root.name
    if submission.job_id is None:
        click.echo(f"{submission.run.root}: already finished, nothing to do; more: mrl resume {name} training.steps=N")
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
        f"  state      mrl status {name}\n"
        f"  output     mrl logs -f {name}\n"
        f"  stop       mrl cancel --drain {name}"
    )


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


def describe(job: Job) -> str:
    """`qwen on 8 nodes x 8 GPUs, colocated`."""
    config = job.recipe.config
    kind = "CPU processes" if config.job.device == "cpu" else "GPUs"
    spare = f" and {job.plan.spare_nodes} spare" if job.plan.spare_nodes else ""
    return f"{config.name} on {_nodes(job.plan.nodes)}{spare} x {job.plan.gpus_per_node} {kind}, {job.plan.mode}"


def steps_in_words(plan: Plan) -> list[str]:
    """One line for the training step, one for all inference replicas."""
    train = next(step for step in plan.steps if step.replica is None)
    replicas = [step for step in plan.steps if step.replica is not None]
    lines = [f"train      {len(train.nodes) * train.tasks_per_node} ranks on {_nodes(len(train.nodes))}"]
    if replicas:
        ranks = len(replicas[0].nodes) * replicas[0].tasks_per_node
        nodes = len({node for step in replicas for node in step.nodes})
        lines.append(f"inference  {len(replicas)} replicas of {ranks} ranks on {_nodes(nodes)}")
    return lines


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


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


def _record(submission: Submission, drafted: Draft) -> dict[str, Any]:
    return {
        "cluster": drafted.job.cluster,
        "run_dir": str(submission.run.root),
        "job_id": submission.job_id,
        "finished": submission.job_id is None,
        "changes": {one.key: [one.old, one.new] for one in submission.changes},
        "notes": list(submission.notes),
    }


def _say_estimates(drafts: Sequence[Draft], after: Sequence[str], asked: Asked) -> None:
    records = []
    for drafted in drafts:
        start, nodes, partition = estimate(drafted, after)
        records.append({"run_dir": str(drafted.job.run_dir), "start": start, "nodes": nodes, "partition": partition})
        if not asked.as_json:
            where = f" on {nodes}" if nodes else ""
            click.echo(f"Slurm would start {describe(drafted.job)} at {start}{where}, partition {partition}")
    if asked.as_json:
        click.echo(json.dumps(records[0] if len(records) == 1 else {"runs": records}))
