"""mrl plan: who does what, how large the batches are, and whether it fits. Needs no cluster."""

from __future__ import annotations

import json

import click

from launcher.cluster.choice import load_clusters
from launcher.fetch.prefetch import known_caches
from launcher.plan.summary import make_plan, plan_json
from launcher.recipe.load import load_recipe


@click.command("plan", short_help="Draw which node and GPU each rank gets, and what fits there.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--cluster", help="Cluster profile that it must fit, instead of the recipe's.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, as in the run directory's plan.json.")
def command(recipe: str, overrides: tuple[str, ...], cluster: str | None, as_json: bool) -> None:
    """Draw which GPU does what, with the arithmetic of batches, memory and checkpoints. Asks no cluster.

    RECIPE is the name of a shipped recipe or a YAML file. Exit code 2: the layout is impossible.
    """
    clusters = load_clusters()
    asked = load_recipe(recipe, overrides, known_caches(clusters))
    name, profile = clusters.choose_profile(cluster, asked.config.cluster)
    plan = make_plan(asked, profile)
    summary = plan_json(asked.config, plan, profile)
    if as_json:
        click.echo(json.dumps(summary, indent=1))
        return
    from launcher.cli.show.plan import show  # rich is slow to import

    show(asked.config, plan, summary, name)
