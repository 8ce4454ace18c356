"""mrl plan: layout, batches, memory, and the fastest split of the nodes. Needs no cluster."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from launcher.cli.arguments import Lags
from launcher.cli.completion import complete_override, complete_recipe, complete_run
from launcher.cluster.choice import load_clusters
from launcher.errors import BadInput
from launcher.fetch.prefetch import known_caches
from launcher.plan.summary import make_plan, plan_json
from launcher.recipe.load import load_recipe

if TYPE_CHECKING:
    from launcher.simulate.scenario import Faults
    from launcher.simulate.splits import Assumptions, Candidate

ONLY_SIMULATED = ("steps", "preempt_every", "grace", "queue", "node_fails_every")
"""Options that need --simulate."""
HOURS = click.FloatRange(min=0, min_open=True)


@click.command("plan", short_help="Show the rank on each node and GPU, the memory it needs, and how long steps take.")
@click.argument("recipe", shell_complete=complete_recipe)
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...", shell_complete=complete_override)
@click.option("--cluster", help="Cluster profile to plan for, instead of the recipe's.")
@click.option("--card", help="GPU to estimate times for; default: the GPU of the profile, else H100.")
@click.option(
    "--answer-tokens",
    type=click.FloatRange(min=1),
    help="Mean length of an answer; default: three tenths of sampling.max_new_tokens.",
)
@click.option("--measured", metavar="RUN", shell_complete=complete_run, help="Use the lengths and speeds of this run.")
@click.option(
    "--max-lag",
    type=Lags(),
    default="0,1",
    show_default=True,
    metavar="LAGS",
    help="Versions that generation may run ahead of training, separated by commas.",
)
@click.option("--simulate", is_flag=True, help="Simulate whole runs with failures, instead of drawing the plan.")
@click.option(
    "--steps", type=click.IntRange(1, 100_000), default=100, show_default=True, help="Steps of a simulated run."
)
@click.option("--preempt-every", type=HOURS, metavar="HOURS", help="Mean time between preemptions.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="Notice before a preemption.",
)
@click.option(
    "--queue",
    type=click.FloatRange(min=0),
    default=10,
    show_default=True,
    metavar="MINUTES",
    help="Time in the queue after a preemption.",
)
@click.option("--node-fails-every", type=HOURS, metavar="HOURS", help="Mean time between failures of one node.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: plan.json with `splits`, or the runs.")
@click.pass_context
def command(
    context: click.Context,
    recipe: str,
    overrides: tuple[str, ...],
    cluster: str | None,
    card: str | None,
    answer_tokens: float | None,
    measured: str | None,
    max_lag: tuple[int, ...],
    simulate: bool,
    steps: int,
    preempt_every: float | None,
    grace: float,
    queue: float,
    node_fails_every: float | None,
    as_json: bool,
) -> None:
    """Show the role of each GPU, the arithmetic of batches, memory and checkpoints, and how long a step takes: with all
    nodes training and generating in turn, and with each split of the nodes. Asks no cluster.

    RECIPE is the name of a shipped recipe or a YAML file.

    Step times are simulated, answer by answer. Speeds come from the card's data sheet, times the share of it that runs
    usually reach; lengths are lognormal. --measured RUN takes both from a run instead, which is more exact. The fastest
    splits have an error bar, with the source of each part. Evaluation and dynamic sampling are not counted.

    --simulate runs all steps, with checkpoints, preemptions and failing nodes: co-located, and at each lag on the
    fastest split.

    Exit codes: 0 planned  2 the layout is impossible, or bad usage
    """
    given = {name for name in ONLY_SIMULATED if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    if given and not simulate:
        raise BadInput(f"--{min(given).replace('_', '-')}: this option describes simulated runs; add --simulate")
    clusters = load_clusters()
    asked = load_recipe(recipe, overrides, known_caches(clusters))
    name, profile = clusters.choose_profile(cluster, asked.config.cluster)
    plan = make_plan(asked, profile)
    # Imported here because these are slow to import.
    from launcher.runs.find import find
    from launcher.simulate.assume import CPU_UNKNOWN, assume, parts_of
    from launcher.simulate.scenario import NEVER, Faults
    from launcher.simulate.splits import compare

    run = None if measured is None else find(measured)
    assumed = None
    if asked.config.supervised:
        if simulate or run is not None:
            raise BadInput("training.objective is supervised: only runs that generate are simulated")
    else:
        assumed = assume(asked.config, profile, card, answer_tokens, run)
    candidates = compare(assumed, plan.nodes, max_lag) if assumed else []
    if simulate:
        if assumed is None:
            raise BadInput(CPU_UNKNOWN)
        faults = Faults(
            preempted_every_s=preempt_every * 3600 if preempt_every else NEVER,
            grace_s=grace,
            queued_s=queue * 60,
            node_fails_every_s=node_fails_every * 3600 if node_fails_every else NEVER,
        )
        _simulate(assumed, candidates, max_lag, faults, steps, as_json)
        return
    summary = plan_json(asked.config, plan, profile)
    parts = parts_of(assumed, run) if assumed else ()
    if as_json:
        from launcher.cli.show.splits import error_bars, splits_json

        bars = [asdict(each) for each in error_bars(candidates, max_lag, parts)]
        splits = {"splits": splits_json(candidates, max_lag), "error_bars": bars, "parts": [*map(asdict, parts)]}
        click.echo(json.dumps(summary | splits, indent=1))
        return
    from launcher.cli.show.plan import show
    from launcher.cli.show.splits import show_splits

    show(asked.config, plan, summary, name)
    if assumed:
        show_splits(assumed, candidates, max_lag, parts)


def _simulate(
    assumed: Assumptions, candidates: list[Candidate], lags: tuple[int, ...], faults: Faults, steps: int, as_json: bool
) -> None:
    from launcher.cli.show.splits import runs_json, show_runs
    from launcher.simulate.splits import run_with_faults

    every = assumed.config.save.every
    runs = [*run_with_faults(candidates, lags, None if every == "auto" else every, faults, steps)]
    if not runs:
        raise BadInput("no split of these nodes fits into the GPUs' memory (mrl plan RECIPE shows how much each lacks)")
    if as_json:
        click.echo(json.dumps(runs_json(assumed, faults, runs), indent=1))
    else:
        show_runs(assumed, faults, runs)
