"""mrl-submit on this machine: start the attempt, watch it to its end."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import click

from launcher.cli.submit.launch import Asked, Planned
from launcher.cluster.choice import LOCAL
from launcher.errors import BadInput
from launcher.host.record import submissions
from launcher.job.run_directory import RUNS, Prepared, check, prepare, run_directory
from launcher.recipe.load import Recipe, dump_resolved
from launcher.runs.commands import mrl
from megatron_rl.config import RunConfig
from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED
from megatron_rl.supported import not_yet


def run_here(planned: Planned, asked: Asked) -> int:
    """Returns the exit code. Raises BadInput."""
    recipe = planned.recipe
    if asked.dry_run:
        explain(recipe, planned.given, asked)
        return EXIT_FINISHED
    if missing := not_yet(recipe.config):
        raise BadInput(missing)
    with run_directory(planned.given, planned.name, Path(RUNS)) as root:
        prepared = prepare(recipe, root, asked.change)
    resume = shlex.join(["mrl-submit", recipe.asked, *recipe.overrides, "--run-dir", str(root)])
    if Path(recipe.asked) == prepared.run.resolved:
        resume = mrl("resume", str(root))
    return start(recipe.config, prepared, resume, asked)


def explain(recipe: Recipe, root: Path | None, asked: Asked) -> None:
    """The dry run: the resolved recipe on stdout, everything else on stderr."""
    config = recipe.config
    changed = check(recipe, root, asked.change) if root else []
    place = root or Path(RUNS) / f"{config.name}-DATE-TIME"
    if asked.as_json:
        values = {"cluster": LOCAL, "run_dir": str(place), "resolved": config.model_dump(mode="json")}
        changes = {one.key: [one.old, one.new] for one in changed}
        click.echo(json.dumps({**values, "changes": changes, "obstacles": not_yet(config)}))
        return
    for one in changed:
        click.echo(f"change: {one}", err=True)
    for obstacle in not_yet(config):
        click.echo(f"would be refused: {obstacle}", err=True)
    click.echo(f"would start {describe(config)} in {place}; its resolved recipe:", err=True)
    click.echo(dump_resolved(config), nl=False)


def describe(config: RunConfig) -> str:
    kind = "CPU processes" if config.job.device == "cpu" else "GPUs"
    return f"{config.name} on {config.job.world_size} {kind} of this machine"


def start(config: RunConfig, prepared: Prepared, resume: str, asked: Asked) -> int:
    """Run the prepared attempt to its end; returns the exit code."""
    # A dry run needs none of these, and they are slow to import.
    from launcher.backends import local
    from launcher.cli.show.ending import EXIT_CODES, account, results
    from launcher.cli.show.panel import choose_view
    from launcher.cli.show.progress import Reader
    from launcher.cli.submit.follow import Follower, Interruptions, Lost
    from launcher.runs.control import DRAIN_MARGIN_S

    run, attempt = prepared.run, prepared.attempt
    if attempt is None:
        reader = Reader(run, run.attempt(run.last_attempt()), config.training.steps)
        for line in [f"{run.root}: already finished, nothing to do", *results(reader.poll())]:
            click.echo(line)
        return EXIT_FINISHED
    say = click.echo if not asked.as_json else lambda text: click.echo(text, err=True)
    for one in prepared.changes:
        say(f"changed: {one}")
    number = "" if attempt.number == 1 else f", attempt {attempt.number}"
    say(f"starting {describe(config)} in {run.root}{number}")
    complaint = submissions.note(run, LOCAL, None)
    if complaint:
        click.echo(f"note: {complaint}", err=True)

    drain_limit_s = config.save.timeout_s + DRAIN_MARGIN_S
    owner = None if asked.detach else os.getpid()
    interruptions = Interruptions()
    with interruptions.caught():
        submitted = local.submit(local.command(run, attempt, config.job, drain_limit_s, owner))
        follower = Follower(run, attempt, submitted, drain_limit_s)
        try:
            begun = follower.wait_for_start()
            if asked.as_json:
                where = {"cluster": LOCAL, "run_dir": str(run.root.absolute()), "job_id": None}
                click.echo(json.dumps({**where, "attempt": attempt.number, "pid": begun["pid"]}))
                return EXIT_FINISHED
            if asked.detach:
                click.echo(f"running. Stop and save with: kill {begun['pid']}\nlogs: {attempt.latest_logs}")
                click.echo(f"resume:      {resume}")
                return EXIT_FINISHED
            reader = Reader(run, attempt, config.training.steps)
            view = choose_view(config.name)
            try:
                end = follower.wait_for_end(reader, view, interruptions)
                view.show(reader.poll())
            finally:
                view.close()
        except Lost as error:
            click.echo(f"failed: {error}\nlogs: {attempt.logs}\nresume:      {resume}", err=True)
            return EXIT_CRASHED
        code = EXIT_CODES[end["outcome"]]
        for line in account(run, attempt, end, reader.status, resume):
            click.echo(line, err=code in (EXIT_CODES["crashed"], EXIT_CODES["misconfigured"]))
        submitted.clean_up()
        return code
