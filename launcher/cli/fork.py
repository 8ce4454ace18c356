"""mrl fork: a new run from a checkpoint of another one."""

from __future__ import annotations

import time
from pathlib import Path

import click

from launcher.cli.complete import complete_override, complete_run


@click.command("fork", short_help="Start a new run from a checkpoint of another.")
@click.argument("run_at_step", metavar="RUN[@STEP]", shell_complete=complete_run)
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...", shell_complete=complete_override)
@click.option("--run-dir", type=click.Path(path_type=Path), help="Of the new run. [default: NAME-DATE-TIME beside RUN]")
@click.option("--cluster", help="Run it there instead of where RUN ran.")
@click.option("--update-code", is_flag=True, help="Run today's code instead of RUN's snapshot.")
@click.option("--dry-run", is_flag=True, help="Say what would differ; writes nothing.")
@click.option("--detach", is_flag=True, help="Return as soon as a local run has started.")
@click.option("--follow", is_flag=True, help="Stay and watch the Slurm job.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")
@click.pass_context
def command(
    context: click.Context,
    run_at_step: str,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    cluster: str | None,
    update_code: bool,
    dry_run: bool,
    detach: bool,
    follow: bool,
    as_json: bool,
) -> None:
    """Start a new run from the checkpoint that RUN wrote after STEP (default: its newest), with other values.

    The new run has everything of the old one up to that step: weights, optimizer, place in the prompt stream, metrics.
    Any value may change but those that the weights fix (model.*, tokenizer.*); what changed is in its fork.json.

    \b
    Exit codes: as of mrl-submit
    """
    import json
    import shutil

    from launcher.changes import changes
    from launcher.cli.launch import Asked, launch
    from launcher.errors import BadInput
    from launcher.forking import checkpoint_of, fill, refuse_misfits
    from launcher.preparation import new_run_dir, opened, run_name
    from launcher.recipe import load_recipe, read_resolved
    from launcher.runs import find

    name, at, number = run_at_step.rpartition("@")
    if at and not number.isdigit():
        raise BadInput(f"{run_at_step}: expected RUN@STEP with the number of a step, such as {name}@400")
    source = find(name if at else run_at_step)
    step = checkpoint_of(source, int(number) if at else None)
    recipe = load_recipe(str(source.resolved), overrides)
    changed = changes(read_resolved(source.resolved), recipe.config)
    refuse_misfits(changed, step, recipe.config.training.steps)
    told = {one.key: [one.old, one.new] for one in changed}
    if dry_run:
        record = {"from": str(source.root.absolute()), "step": step, "changes": told}
        lines = [f"would fork {source.root} after step {step}", *(f"  {one}" for one in changed)]
        click.echo(json.dumps(record) if as_json else "\n".join(lines))
        return
    parent = source.root.absolute().parent
    root = (run_dir or new_run_dir(run_name(recipe.config.name, time.localtime()), parent)).absolute()
    with opened(recipe, root, False) as (run, _, _):
        if run.checkpoints.exists():
            raise BadInput(f"{root}: holds a run already; give a new directory")
        fill(source, step, run, changed)
        if not as_json:
            click.echo(f"forked {source.root.name} after step {step}" + "".join(f"\n  {one}" for one in changed))
    asked = Asked(
        recipe=str(run.resolved),
        cluster=cluster or recipe.config.cluster or "local",
        run_dir=root,
        detach=detach,
        follow=follow,
        as_json=as_json,
        update_code=update_code,
    )
    try:
        context.exit(launch(asked))
    except BadInput:
        shutil.rmtree(root)  # nothing has started in it
        raise
