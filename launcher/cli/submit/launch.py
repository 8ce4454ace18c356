"""Start runs for mrl-submit, mrl resume and mrl fork."""

from __future__ import annotations

import click

from launcher.cli.submit.request import PlannedRun, Request, plan_runs, why_local
from launcher.cluster.choice import LOCAL, load_clusters
from launcher.job.directories import refuse_unusable
from launcher.plan.engine_choice import note_of
from launcher.recipe.advice import warnings
from megatron_rl.contract.paths import RunDir


def launch(request: Request) -> int:
    clusters = load_clusters()
    cluster, planned = plan_runs(request, clusters)
    for note in dict.fromkeys(_implied(one) for one in planned if one.recipe.implied):
        click.echo(f"note: {note}", err=True)
    for note in dict.fromkeys(filter(None, (note_of(one.recipe) for one in planned))):
        click.echo(f"note: {note}", err=True)
    for warning in dict.fromkeys(text for one in planned for text in warnings(one.recipe.config)):
        click.echo(f"warning: {warning}", err=True)
    for one in planned:
        if one.given is not None:
            # Imports Slurm's client, which a new local run does not need.
            from launcher.runs.owner import refuse_others, warning_of_readers

            refuse_unusable(one.given)
            refuse_others(RunDir(one.given), request.trust)
            shared = cluster != LOCAL and clusters.profile(cluster).readable_by != "me"
            if not shared and (readers := warning_of_readers(one.given)):
                click.echo(f"warning: {readers}", err=True)
    if cluster != LOCAL:
        from launcher.cli.submit.slurm import run_on_slurm  # each of the two has imports that the other does not need

        return run_on_slurm(planned, request, clusters.profile(cluster))
    from launcher.cli.submit.this_machine import refuse_slurm_only, run_on_this_machine

    refuse_slurm_only(request, len(planned))
    if why := why_local(request, clusters, planned[0]):
        click.echo(f"note: {why}", err=True)
    return run_on_this_machine(planned[0], request)


def _implied(planned: PlannedRun) -> str:
    recipe = planned.recipe
    texts = " ".join(override.text for override in recipe.implied)
    return f"inference.engine={recipe.config.inference.engine} also sets {texts}"
