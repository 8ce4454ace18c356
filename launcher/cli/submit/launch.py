"""Start runs for mrl-submit, mrl resume and mrl fork: ask, print, and leave the work to `launcher.start`."""

from __future__ import annotations

from dataclasses import replace

import click

from launcher.cli.show.terminal import at_terminal
from launcher.cluster.choice import LOCAL, load_clusters
from launcher.errors import Failed
from launcher.start.planned import check_directories, remarks_of
from launcher.start.request import Request, large_sweep, plan_runs, why_local
from megatron_rl.contract.files import only_owner_writes


@only_owner_writes()
def launch(request: Request) -> int:
    clusters = load_clusters()
    cluster, planned = plan_runs(_confirmed(request), clusters)
    remarks = remarks_of(planned)
    for note in remarks.notes:
        click.echo(f"note: {note}", err=True)
    for warning in (*remarks.warnings, *check_directories(planned, request, clusters, cluster)):
        click.echo(f"warning: {warning}", err=True)
    if cluster != LOCAL:
        from launcher.cli.submit.slurm import run_on_slurm  # each of the two has imports that the other does not need

        return run_on_slurm(planned, request, clusters.profile(cluster))
    from launcher.cli.submit.this_machine import refuse_slurm_only, run_on_this_machine

    refuse_slurm_only(request, len(planned))
    if why := why_local(request, clusters, planned[0]):
        click.echo(f"note: {why}", err=True)
    return run_on_this_machine(planned[0], request)


def _confirmed(request: Request) -> Request:
    """Ask at the terminal whether to submit a large sweep. Raises Failed where the user declines."""
    runs = large_sweep(request)
    if not runs or not at_terminal():
        return request
    if not click.confirm(f"This is a sweep of {runs} runs. Continue?", err=True):
        raise Failed("nothing was done")
    return replace(request, yes=True)
