"""mrl plan: layout, batches, memory, the fastest split of the nodes, and the time of the run. Needs no cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from launcher.cli.arguments import RECIPE, TRUST_RUN, Lags
from launcher.cli.completion import complete_run
from launcher.cluster.choice import load_clusters
from launcher.errors import BadInput
from launcher.fetch.needs import known_caches
from launcher.plan.engine_choice import load_for, note_of
from launcher.plan.summary import make_plan, summarize

if TYPE_CHECKING:
    from launcher.cluster.profile import Profile
    from launcher.plan.costs import Scenario
    from launcher.plan.failures import ExpectedRun, Faults
    from launcher.plan.splits import Assumptions, Candidate
    from megatron_rl.recipe.config import RunConfig

OF_PREEMPTIONS = ("grace", "queue")
HOURS = click.FloatRange(min=0, min_open=True)


@click.command("plan")
@RECIPE
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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: plan.json with `splits` and `runs`.")
@TRUST_RUN
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
    preempt_every: float | None,
    grace: float,
    queue: float,
    node_fails_every: float | None,
    as_json: bool,
    trust: bool,
) -> None:
    """Show the roles of the nodes, the arithmetic of batches, memory and checkpoints, how long a step takes: with all
    nodes training and generating in turn, and with each split of the nodes, and how long the run takes. Asks no
    cluster.

    RECIPE is the name of a shipped recipe or a YAML file.

    Times are formulas, not measurements. Speeds come from the card's data sheet, times the share of it that runs
    usually reach; lengths are lognormal. --measured RUN takes both from a run instead, which is more exact. Evaluation
    and dynamic sampling are not counted.

    --preempt-every and --node-fails-every add the expected restarts and repeated steps to the time of the run, which
    is shown co-located, and at each lag on the fastest split.

    Exit codes: 0 planned  2 the layout is impossible, or bad usage
    """
    given = {name for name in OF_PREEMPTIONS if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    if given and not preempt_every:
        raise BadInput(f"--{min(given)}: this option describes preemptions; add --preempt-every HOURS")
    clusters = load_clusters()
    asked, name, profile = load_for(recipe, overrides, clusters, cluster, known_caches(clusters), trusted=trust)
    plan = make_plan(asked, profile)
    # Imported here because these are slow to import.
    from launcher.cli.show.layout import show
    from launcher.cli.show.step_times import estimates_json, show_estimates
    from launcher.plan.splits import compare

    faults = _faults(preempt_every, grace, queue, node_fails_every)
    assumed = _assumed(asked.config, profile, (card, answer_tokens, measured), faults)
    candidates = compare(assumed, plan.nodes, max_lag) if assumed else []
    runs = _runs(assumed, candidates, max_lag, faults) if assumed else []
    summary = summarize(asked.config, plan, profile)
    if as_json:
        engine = {"engine": asked.config.inference.engine, "engine_because": asked.engine_because}
        click.echo(json.dumps(summary | engine | estimates_json(candidates, max_lag, runs), indent=1))
        return
    show(asked.config, plan, summary, name, note_of(asked))
    if assumed:
        show_estimates(assumed, candidates, max_lag, faults, runs)


def _faults(preempt_every: float | None, grace: float, queue: float, node_fails_every: float | None) -> Faults:
    from launcher.plan.failures import NEVER, Faults

    return Faults(
        preempted_every_s=preempt_every * 3600 if preempt_every else NEVER,
        grace_s=grace,
        queued_s=queue * 60,
        node_fails_every_s=node_fails_every * 3600 if node_fails_every else NEVER,
    )


def _assumed(
    config: RunConfig, profile: Profile | None, given: tuple[str | None, float | None, str | None], faults: Faults
) -> Assumptions | None:
    """Return the assumptions about speeds; None if steps of this recipe are not estimated.

    Args:
        given: values of --card, --answer-tokens and --measured.
    """
    from launcher.plan.assume import CPU_UNKNOWN, assume
    from launcher.runs.find import find

    card, answer_tokens, measured = given
    run = None if measured is None else find(measured)
    if config.supervised:
        if faults.expected or run is not None:
            raise BadInput("training.objective is supervised: only steps that generate are estimated")
        return None
    assumed = assume(config, profile, card, answer_tokens, run)
    if assumed is None and faults.expected:
        raise BadInput(CPU_UNKNOWN)
    return assumed


def _runs(
    assumed: Assumptions, candidates: Sequence[Candidate], lags: tuple[int, ...], faults: Faults
) -> list[tuple[Scenario, ExpectedRun]]:
    from launcher.plan.splits import expect_runs

    every = assumed.config.save.every
    runs = [*expect_runs(candidates, lags, faults, assumed.config.training.steps, None if every == "auto" else every)]
    if faults.expected and not runs:
        raise BadInput("no split of these nodes fits into the GPUs' memory (mrl plan RECIPE shows how much each lacks)")
    return runs
