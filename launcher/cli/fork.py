"""mrl fork: a new run from a checkpoint of another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from launcher.cli.arguments import OVERRIDES, STARTED, TRUST_RUN, RunDirectory
from launcher.cli.completion import complete_run


@click.command("fork")
@click.argument("run_at_step", metavar="RUN[@STEP]", shell_complete=complete_run)
@OVERRIDES
@click.option("--run-dir", type=RunDirectory(), help="Directory of the new run. [default: NAME-DATE-TIME next to RUN]")
@click.option("--cluster", help="Cluster to run on, instead of RUN's.")
@click.option("--update-code", is_flag=True, help="Use today's code instead of RUN's snapshot.")
@TRUST_RUN
@click.option("--dry-run", is_flag=True, help="Show what would differ; write nothing.")
@STARTED
@click.pass_context
def command(
    context: click.Context,
    run_at_step: str,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    cluster: str | None,
    trust: bool,
    dry_run: bool,
    as_json: bool,
    **others: Any,
) -> None:
    """Start a new run from the checkpoint that RUN wrote after STEP (default: its newest), with other values.

    The new run has everything of the old one up to that step: weights, optimizer, position in the prompts, metrics. Any
    value may change, except those that the weights determine (model.*, tokenizer.*); changes are recorded in its
    fork.json. It trains on the problems of today, whereas resuming RUN requires the problems that it began with.

    The new run uses RUN's snapshot of the code (or today's, with --update-code), so a run of another user is refused
    without --trust.

    \b
    Exit codes: as of mrl-submit
    """
    from launcher.cli.submit.launch import launch
    from launcher.cluster.choice import LOCAL
    from launcher.job.forked_run import forked, plan_fork
    from launcher.recipe.changes import as_json as changes_json
    from launcher.start.request import Request

    fork = plan_fork(run_at_step, overrides, trust)
    where = f"{fork.source.root.name} after step {fork.step}" + "".join(f"\n  {one}" for one in fork.changes)
    if dry_run:
        answer = {"from": str(fork.source.root.absolute()), "step": fork.step, "changes": changes_json(fork.changes)}
        click.echo(json.dumps(answer) if as_json else f"would fork {where}")
        return
    chosen = cluster or fork.recipe.config.cluster or LOCAL
    with forked(fork, run_dir, keeps_code=chosen != LOCAL and not others["update_code"]) as run:
        if not as_json:
            click.echo(f"forked {where}")
        request = Request(
            recipe=str(run.resolved),
            cluster=chosen,
            run_dir=run.root,
            trust=trust,
            as_json=as_json,
            **others,
        )
        code = launch(request)
    context.exit(code)
