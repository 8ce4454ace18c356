"""mrl prefetch: fetch the files that a recipe reads from the internet into a cluster's cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from launcher.cli.arguments import RECIPE, TRUST_RUN
from launcher.cli.show.terminal import echo
from launcher.cluster.choice import load_clusters
from launcher.errors import Failed
from launcher.fetch.needs import Cache, Need, fetch, known_caches, needs, unreachable
from launcher.plan.engine_choice import load_for
from launcher.recipe.load import load_recipe
from launcher.recipe.published import ShapeUnknown
from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED


@click.command("prefetch")
@RECIPE
@click.option("--cluster", help="Cluster whose cache is filled, instead of the recipe's.")
@click.option("--check", is_flag=True, help="Only show what is there and what is missing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, for programs.")
@TRUST_RUN
@click.pass_context
def command(
    context: click.Context,
    recipe: str,
    overrides: tuple[str, ...],
    cluster: str | None,
    check: bool,
    as_json: bool,
    trust: bool,
) -> None:
    """Fetch the container image, model, tokenizer and data sets of RECIPE into the cluster's cache.

    Run it on a machine with internet that sees the cluster's run_root; the job itself runs offline. Files that are
    already there are not fetched again, unless their tag or branch has moved. For gated models set HF_TOKEN or run `hf
    auth login`; enroot has its own credentials (containers/README.md).

    \b
    Exit codes:
      0  everything is there
      1  something could not be fetched; with --check: something is missing
      2  the recipe or an argument cannot be used
    """
    clusters = load_clusters()
    try:
        config = load_for(recipe, overrides, clusters, cluster, known_caches(clusters), trusted=trust)[0].config
    except ShapeUnknown as unknown:
        cache = Cache.of(clusters.choose_profile(cluster, unknown.cluster)[1])
        if check:
            raise
        _fetch_all([Need("model", unknown.model)], cache)
        config = load_recipe(recipe, overrides, [cache.huggingface], trusted=trust).config
    name, profile = clusters.choose_profile(cluster, config.cluster)
    cache, wanted = Cache.of(profile), needs(config, profile)
    if not check:
        _fetch_all(wanted, cache)
    found = {need: cache.find(need) for need in wanted}
    if as_json:
        rows = [{"kind": need.kind, "name": need.name, "path": path and str(path)} for need, path in found.items()]
        click.echo(json.dumps({"cluster": name, "needs": rows}, indent=1))
    else:
        for line in table(found):
            click.echo(line)
    context.exit(EXIT_FINISHED if all(found.values()) else EXIT_CRASHED)


def _fetch_all(wanted: Sequence[Need], cache: Cache) -> None:
    """Fetch all items, or look whether their tags have moved. Raises Failed at once if the hub cannot be reached and an
    item of it is missing."""
    away = unreachable() if any(need.of_the_hub for need in wanted) else ""
    missing = [str(need) for need in wanted if need.of_the_hub and cache.find(need) is None]
    if away and missing:
        raise Failed(
            f"{away}; run mrl prefetch on a machine with internet that sees {cache.huggingface}, or set HF_ENDPOINT or "
            f"HTTPS_PROXY. Missing: {', '.join(missing)}"
        )
    for need in wanted:
        if away and need.of_the_hub:
            echo(f"{need} is there; {away}, so that newer files were not looked for", err=True)
            continue
        echo(f"fetching {need}", err=True)
        fetch(need, cache)


def table(found: Mapping[Need, Path | None]) -> list[str]:
    if not found:
        return ["nothing to fetch"]
    width = max(len(str(need)) for need in found)
    return [f"{need!s:<{width}}  {path or 'missing'}" for need, path in found.items()]
