"""mrl plan: who does what, how large the batches are, whether it fits, and which split is fastest. Needs no cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from launcher.cli.arguments import Counts
from launcher.cli.completion import complete_run
from launcher.cluster.choice import load_clusters
from launcher.errors import BadInput
from launcher.fetch.prefetch import known_caches
from launcher.plan.summary import make_plan, plan_json
from launcher.recipe.load import load_recipe

if TYPE_CHECKING:
    from launcher.simulate.splits import Assumptions
    from launcher.simulate.sweep import Sweep

ONLY_SIMULATED = ("nodes", "grow_batch", "steps", "seeds", "preempt_every", "grace", "queue", "node_fails_every", "out")
"""Options that mean something with --simulate alone."""
HOURS = click.FloatRange(min=0, min_open=True)


@click.command("plan", short_help="Draw which node and GPU each rank gets, what fits there, and how long steps take.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--cluster", help="Cluster profile that it must fit, instead of the recipe's.")
@click.option("--card", help="GPU that times are estimated for; default: the one that the profile names, else H100.")
@click.option(
    "--answer-tokens",
    type=click.FloatRange(min=1),
    help="Mean length of an answer; default: three tenths of sampling.max_new_tokens.",
)
@click.option(
    "--lengths",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Lengths of answers, one a line, used in their order.",
)
@click.option("--measured", metavar="RUN", shell_complete=complete_run, help="Lengths and speeds as that run had them.")
@click.option(
    "--max-lag",
    type=Counts(0, 16),
    default="0,1",
    show_default=True,
    metavar="LAGS",
    help="Versions that generation may be ahead of training.",
)
@click.option("--simulate", is_flag=True, help="Simulate whole runs, faults included, instead of drawing the plan.")
@click.option(
    "--nodes", type=Counts(1, 4096), metavar="COUNTS", help="8,12 or, doubling, 8-512; default: the recipe's."
)
@click.option("--grow-batch", is_flag=True, help="Prompts of a step grow with the nodes.")
@click.option("--steps", type=click.IntRange(1, 100_000), default=100, show_default=True, help="Of a run.")
@click.option("--seeds", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs of each kind.")
@click.option("--preempt-every", type=HOURS, metavar="HOURS", help="Mean time between preemptions.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="That a preemption leaves.",
)
@click.option(
    "--queue",
    type=click.FloatRange(min=0),
    default=10,
    show_default=True,
    metavar="MINUTES",
    help="In the queue after one.",
)
@click.option("--node-fails-every", type=HOURS, metavar="HOURS", help="Mean time between failures of one node.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Also write the table and charts there.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: plan.json and `splits`, or what was simulated.")
@click.pass_context
def command(
    context: click.Context,
    recipe: str,
    overrides: tuple[str, ...],
    cluster: str | None,
    card: str | None,
    answer_tokens: float | None,
    lengths: Path | None,
    measured: str | None,
    max_lag: tuple[int, ...],
    simulate: bool,
    nodes: tuple[int, ...] | None,
    grow_batch: bool,
    steps: int,
    seeds: int,
    preempt_every: float | None,
    grace: float,
    queue: float,
    node_fails_every: float | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Draw which GPU does what, with the arithmetic of batches, memory and checkpoints, and say how long a step takes
    and who waits in it: with all nodes training and generating in turn, and with each split of them. Asks no cluster.

    RECIPE is the name of a shipped recipe or a YAML file.

    Step times are simulated, answer by answer. Speeds are those of the card's data sheet times what runs usually get
    of it (launcher/simulate/estimate.py says how much of what, and where that is from); lengths are lognormal. Both
    are better known from a run: --measured RUN. Not counted: evaluation and dynamic sampling.

    --simulate makes whole runs, with checkpoints, preemptions and nodes that fail, for each count of --nodes:
    co-located, and at each lag on the split that is fastest there.

    Exit code 2: the layout is impossible.
    """
    given = {name for name in ONLY_SIMULATED if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    if given and not simulate:
        raise BadInput(f"--{min(given).replace('_', '-')}: is about simulated runs: add --simulate")
    clusters = load_clusters()
    asked = load_recipe(recipe, overrides, known_caches(clusters))
    name, profile = clusters.choose_profile(cluster, asked.config.cluster)
    plan = make_plan(asked, profile)
    # What follows is slow to import, or seldom needed.
    from launcher.runs.find import find
    from launcher.simulate.assume import assume, given_lengths
    from launcher.simulate.splits import compare

    run = None if measured is None else find(measured)
    assumed = None
    if asked.config.inference.engine != "server":  # of which nothing is known here
        assumed = assume(asked.config, profile, card, given_lengths(asked.config, answer_tokens, lengths), run)
    if simulate:
        from launcher.simulate.scenario import NEVER, Faults
        from launcher.simulate.sweep import Sweep

        if asked.config.inference.engine == "server":
            raise BadInput("inference.engine is server: how fast that answers is not known; simulate native")
        if assumed is None:
            raise BadInput("job.device is cpu: how fast that is only a run can tell: --measured RUN")
        faults = Faults(
            preempted_every_s=preempt_every * 3600 if preempt_every else NEVER,
            grace_s=grace,
            queued_s=queue * 60,
            node_fails_every_s=node_fails_every * 3600 if node_fails_every else NEVER,
        )
        _simulate(assumed, Sweep(nodes or (plan.nodes,), max_lag, steps, seeds, faults, grow_batch), out, as_json)
        return
    summary = plan_json(asked.config, plan, profile)
    candidates = compare(assumed, plan.nodes, max_lag) if assumed else []
    if as_json:
        from launcher.cli.show.splits import splits_json

        click.echo(json.dumps(summary | {"splits": splits_json(candidates, max_lag)}, indent=1))
        return
    from launcher.cli.show.plan import show
    from launcher.cli.show.splits import show_splits

    show(asked.config, plan, summary, name)
    if assumed:
        show_splits(assumed, candidates, max_lag)


def _simulate(assumed: Assumptions, sweep: Sweep, out: Path | None, as_json: bool) -> None:
    from launcher.cli.show.simulation import LEGEND, assumptions, sweep_json, table, write_files

    points = []
    for point in sweep.points(assumed):
        points.append(point)
        click.echo(f"{point.gpus:,} GPUs, {point.mode}: done", err=True)
    if not points:
        raise BadInput("--nodes: none of these counts gives a layout that fits (mrl plan RECIPE job.nodes=N says why)")
    files = write_files(out, assumed, sweep, points) if out else []
    if as_json:
        click.echo(json.dumps(sweep_json(assumed, sweep, points), indent=1))
        return
    click.echo(f"simulation, nothing was measured: {assumptions(assumed, sweep)}\n")
    click.echo("\n".join(table(points)))
    click.echo(f"\n{LEGEND}")
    for file in files:
        click.echo(f"wrote {file}")
