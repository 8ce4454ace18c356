"""mrl plan: who does what, how large the batches are, whether it fits, and which split is fastest. Needs no cluster."""

from __future__ import annotations

import json

import click

from launcher.cli.arguments import Counts
from launcher.cli.completion import complete_run
from launcher.cluster.choice import load_clusters
from launcher.fetch.prefetch import known_caches
from launcher.plan.summary import make_plan, plan_json
from launcher.recipe.load import load_recipe


@click.command("plan", short_help="Draw which node and GPU each rank gets, what fits there, and how long steps take.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--cluster", help="Cluster profile that it must fit, instead of the recipe's.")
@click.option(
    "--card", help="GPU that step times are estimated for; default: the one that the profile names, else H100."
)
@click.option(
    "--answer-tokens",
    type=click.FloatRange(min=1),
    help="Mean length of an answer; default: three tenths of sampling.max_new_tokens.",
)
@click.option("--measured", metavar="RUN", shell_complete=complete_run, help="Lengths and speeds as that run had them.")
@click.option(
    "--max-lag", type=Counts(0, 16), default="0,1", show_default=True, help="Versions generation may be ahead, each."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object: the run directory's plan.json, and `splits`.")
def command(
    recipe: str,
    overrides: tuple[str, ...],
    cluster: str | None,
    card: str | None,
    answer_tokens: float | None,
    measured: str | None,
    max_lag: tuple[int, ...],
    as_json: bool,
) -> None:
    """Draw which GPU does what, with the arithmetic of batches, memory and checkpoints, and say how long a step takes
    and who waits in it: with all nodes training and generating in turn, and with each split of them. Asks no cluster.

    RECIPE is the name of a shipped recipe or a YAML file.

    Step times are simulated, answer by answer. Speeds are those of the card's data sheet times what runs usually get
    of it (launcher/simulate/estimate.py says how much of what, and where that is from); lengths are lognormal. Both
    are better known from a run: --measured RUN. Not counted: evaluation, dynamic sampling, faults.

    Exit code 2: the layout is impossible.
    """
    clusters = load_clusters()
    asked = load_recipe(recipe, overrides, known_caches(clusters))
    name, profile = clusters.choose_profile(cluster, asked.config.cluster)
    plan = make_plan(asked, profile)
    summary = plan_json(asked.config, plan, profile)
    # What follows is slow to import, or seldom needed.
    from launcher.cli.show.splits import show_splits, splits_json
    from launcher.runs.find import find
    from launcher.simulate.assume import assume
    from launcher.simulate.splits import compare

    assumed = assume(asked.config, profile, card, answer_tokens, None if measured is None else find(measured))
    candidates = compare(assumed, plan.nodes, max_lag) if assumed else []
    if as_json:
        click.echo(json.dumps(summary | {"splits": splits_json(candidates, max_lag)}, indent=1))
        return
    from launcher.cli.show.plan import show

    show(asked.config, plan, summary, name)
    if assumed:
        show_splits(assumed, candidates, max_lag)
