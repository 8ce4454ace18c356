"""mrl-submit: from a recipe to a running job."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

import click

from launcher.backends import local
from launcher.changes import CHANGEABLE
from launcher.cli.ending import EXIT_CODES, account, results
from launcher.cli.follow import Follower, Interruptions, Lost
from launcher.cli.record import Reader
from launcher.cli.view import choose_view
from launcher.errors import BadInput
from launcher.preparation import RUNS, Prepared, check, new_run_dir, prepare, run_name
from launcher.recipe import Recipe, dump_resolved, load_recipe
from megatron_rl.config import RunConfig
from megatron_rl.run_dir import EXIT_CRASHED, EXIT_FINISHED

DRAIN_MARGIN_S = 60  # beside the save itself: the step that is under way

HELP = f"""Train what RECIPE describes: the name of a shipped recipe (demo) or a YAML file.

SECTION.KEY=VALUE overrides a value of the recipe, written as in YAML: grpo.group_size=8

With the --run-dir of an earlier call the run goes on where it was saved; it must be given the same values. --change
accepts others for these, and records them: {", ".join(CHANGEABLE)}. More training.steps reopen a finished run;
grpo.kl_beta may also become or stop being 0.

Ctrl-C saves and leaves, a second one kills. SIGTERM and a closed terminal save and leave as well.

\b
Exit codes:
  0    finished, now or before; with --detach: started
  1    crashed, or killed before it could save
  2    the recipe, an argument or the run directory cannot be used
  130  interrupted and saved: the printed command goes on with it
"""


@click.command(help=HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--cluster", help="Where to run, instead of the recipe's cluster: local is this machine.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Directory of the run. [default: runs/NAME-DATE-TIME]")
@click.option("--change", is_flag=True, help="Resume with other values than before, where that is allowed.")
@click.option("--dry-run", is_flag=True, help="Check everything, say what would happen, start and write nothing.")
@click.option("--detach", is_flag=True, help="Return as soon as the run has started; it lives on.")
@click.pass_context
def main(
    context: click.Context,
    recipe: str,
    overrides: tuple[str, ...],
    cluster: str | None,
    run_dir: Path | None,
    change: bool,
    dry_run: bool,
    detach: bool,
) -> None:
    asked = load_recipe(recipe, [*overrides, *([f"cluster={cluster}"] if cluster else [])])
    if asked.config.cluster != "local":
        where = "the recipe names none" if asked.config.cluster is None else f"{asked.config.cluster!r} is not known"
        raise BadInput(f"cluster: {where}; --cluster local runs on this machine")
    if dry_run:
        explain(asked, run_dir, change)
        return
    root = run_dir or new_run_dir(run_name(asked.config.name, time.localtime()), Path(RUNS))
    prepared = prepare(asked, root, change)
    resume = shlex.join(["mrl-submit", asked.asked, *asked.overrides, "--run-dir", str(root)])
    context.exit(start(asked.config, prepared, resume, detach))


def explain(recipe: Recipe, root: Path | None, change: bool) -> None:
    """The dry run: the resolved recipe on stdout, everything else on stderr."""
    config = recipe.config
    changed = check(recipe, root, change) if root else []
    for one in changed:
        click.echo(f"change: {one}", err=True)
    place = root or Path("runs") / f"{config.name}-DATE-TIME"
    click.echo(f"would start {describe(config)} in {place}; its resolved recipe:", err=True)
    click.echo(dump_resolved(config), nl=False)


def describe(config: RunConfig) -> str:
    kind = "CPU processes" if config.job.device == "cpu" else "GPUs"
    return f"{config.name} on {config.job.world_size} {kind} of this machine"


def start(config: RunConfig, prepared: Prepared, resume: str, detach: bool) -> int:
    """Run the prepared attempt to its end; returns the exit code."""
    run, attempt = prepared.run, prepared.attempt
    if attempt is None:
        reader = Reader(run, run.attempt(run.last_attempt()), config.training.steps)
        for line in [f"{run.root}: already finished, nothing to do", *results(reader.poll())]:
            click.echo(line)
        return EXIT_FINISHED
    for one in prepared.changes:
        click.echo(f"changed: {one}")
    number = "" if attempt.number == 1 else f", attempt {attempt.number}"
    click.echo(f"starting {describe(config)} in {run.root}{number}")

    drain_limit_s = config.save.timeout_s + DRAIN_MARGIN_S
    owner = None if detach else os.getpid()
    interruptions = Interruptions()
    with interruptions.caught():
        submitted = local.submit(local.command(run, attempt, config.job, drain_limit_s, owner))
        follower = Follower(run, attempt, submitted, drain_limit_s)
        try:
            begun = follower.wait_for_start()
            if detach:
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
