"""mrl rows: the rows or problems of a recipe, as the model sees them in training."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from launcher.cli.arguments import RECIPE, TRUST_RUN
from launcher.cluster.choice import load_clusters
from launcher.errors import BadInput
from launcher.fetch.needs import known_caches
from launcher.job.kept_files import keep_files, own_files
from launcher.job.lesson import request_of, rows_child, why_not_here
from launcher.recipe.load import Recipe, load_recipe
from launcher.runs.find import find, names_run
from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED
from megatron_rl.contract.files import seen
from megatron_rl.contract.owned_folders import owned_folder
from megatron_rl.contract.paths import RunDir

HELP = """Show the first rows or problems of RECIPE as the model sees them in training.

RECIPE is the name of a shipped recipe, a YAML file, or a run. SECTION.KEY=VALUE overrides a value. The code of the run
reads the data, fills in the chat template and scores answers; no model, GPU or cluster is needed.

Supervised rows: all tokens; those that are learned stand between [[ and ]]. An environment of answers: the prompt, the
right answer with its reward, and a wrong one. A program: the problem that it reads.

--all reads every row instead, and shows their number, rows that are dropped, by reason, lengths, equal rows, and the
share of tokens that is learned.

\b
Exit codes:
  0  every row that was read can be trained on
  1  a row would be dropped, an answer could not be scored, or the right answer has no higher reward than the wrong one
  2  the recipe or its data cannot be used, or only the cluster has them
"""


@click.command("rows", help=HELP)
@RECIPE
@click.option("-n", "first", type=click.IntRange(min=1), default=3, show_default=True, help="Number of rows to show.")
@click.option("--all", "whole", is_flag=True, help="Read every row, and show their counts and lengths.")
@click.option("--cluster", help="Cluster whose files are read, instead of the recipe's.")
@TRUST_RUN
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: {rows: [...]}, with --all {sets: [...]}.")
@click.pass_context
def command(
    context: click.Context,
    recipe: str,
    overrides: tuple[str, ...],
    first: int,
    whole: bool,
    cluster: str | None,
    trust: bool,
    as_json: bool,
) -> None:
    from launcher.cli.show.row_lines import count_lines, row_lines

    clusters = load_clusters()
    run = find(recipe) if not seen(Path(recipe).is_file) and names_run(recipe) else None
    asked = load_recipe(str(run.resolved) if run else recipe, overrides, known_caches(clusters), trusted=trust)
    _, profile = clusters.choose_profile(cluster, asked.config.cluster)
    if why := why_not_here(asked.config, profile):
        raise BadInput(why)
    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        copies = _copies(asked, run, stack)
        included = [Path(path) for path in asked.config.code.include or ()]
        purpose = "count" if whole else "show"
        request = request_of(asked, profile, purpose=purpose, first=first, copies=copies)
        child = stack.enter_context(rows_child(profile, included))
        child.send(request.model_dump_json())
        child.end_input()
        for one in child.said():
            found.append(one)
            if not as_json:
                click.echo("\n".join(count_lines(one) if whole else row_lines(one)))
        child.finish()
    if as_json:
        click.echo(json.dumps({"sets" if whole else "rows": found}, indent=1))
    context.exit(EXIT_CRASHED if any(map(is_faulty, found)) else EXIT_FINISHED)


def _copies(recipe: Recipe, run: RunDir | None, stack: ExitStack) -> RunDir | None:
    if run is not None or not own_files(recipe.config):
        return run
    copies = RunDir(stack.enter_context(owned_folder("copies")))
    keep_files(copies, recipe, renew=True)
    return copies


def is_faulty(one: dict[str, Any]) -> bool:
    """Whether a row is dropped, or an answer is not scored as it should be. Counts are not judged."""
    if "gold_reward" not in one:
        return isinstance(one.get("dropped"), str)
    gold, wrong = one["gold_reward"], one["wrong_reward"]
    unscored = wrong is None if "no_gold" in one else None in (gold, wrong)
    return unscored or (gold is not None and gold <= wrong) or one["tokens"] > one["room"]
