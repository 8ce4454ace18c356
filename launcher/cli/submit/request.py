"""What mrl-submit was asked for, and the runs that this means: recipes, names, the cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from launcher.cli.show.terminal import at_terminal
from launcher.cluster.choice import LOCAL, Clusters
from launcher.errors import BadInput, Failed
from launcher.fetch.prefetch import known_caches
from launcher.job.directories import run_name
from launcher.recipe.load import Recipe, load_recipe, place_of
from launcher.recipe.sweep import Variant, count, variants
from megatron_rl.contract.paths import RunDir

LARGE_SWEEP = 100  # runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command line of mrl-submit, option by option, or what `mrl resume` and `mrl fork` make of theirs."""

    recipe: str
    overrides: tuple[str, ...] = ()
    cluster: str | None = None
    run_dir: Path | None = None
    change: bool = False
    trust: bool = False
    dry_run: bool = False
    script: bool = False
    as_json: bool = False
    test_only: bool = False
    detach: bool = False
    follow: bool = False
    after: tuple[str, ...] = ()
    max_running: int | None = None
    in_allocation: bool = False
    yes: bool = False
    """A large sweep is meant."""
    update_code: bool = False
    """Of `mrl resume` and `mrl fork` only."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of those asked for."""

    recipe: Recipe
    """With the cluster that was chosen."""
    name: str
    """Of its directory, where it gets a new one."""
    given: Path | None
    """The directory it was given."""
    asked_cluster: str | None
    """`cluster` of the recipe as it is written."""


def plan_runs(request: Request, clusters: Clusters) -> tuple[str, list[PlannedRun]]:
    """The cluster that all of a request's runs go to, and the runs; more than one of a sweep.

    Raises:
        BadInput: the recipe, an override or the cluster cannot be used, or the options contradict one another.
    """
    _refuse_contradictions(request)
    _confirm_large(count(request.overrides), request.yes)
    found = variants(request.overrides)
    if len(found) > 1 and request.run_dir and RunDir(request.run_dir).resolved.exists():
        raise BadInput(
            f"{request.run_dir} holds a run, and {len(found)} runs are asked for: give one value a key, and quote a "
            "comma that belongs to a value"
        )
    caches = known_caches(clusters)
    recipes = [load_recipe(request.recipe, variant.overrides, caches) for variant in found]
    _refuse_twins(recipes, found)
    chosen = {clusters.choose(request.cluster, recipe.config.cluster) for recipe in recipes}
    if len(chosen) > 1:
        raise BadInput(f"cluster: a sweep goes to one cluster, not to {', '.join(sorted(chosen))}")
    cluster = chosen.pop()
    stem = run_name(recipes[0].config.name, time.localtime())
    planned = []
    for recipe, variant in zip(recipes, found, strict=True):
        placed = replace(recipe, config=recipe.config.model_copy(update={"cluster": cluster}))
        given = request.run_dir / variant.name if request.run_dir and variant.name else request.run_dir
        name = "_".join(filter(None, (stem, variant.name)))
        planned.append(PlannedRun(placed, name, given, recipe.config.cluster))
    return cluster, planned


def _confirm_large(runs: int, yes: bool) -> None:
    if runs <= LARGE_SWEEP or yes:
        return
    if not at_terminal():
        raise BadInput(f"this is a sweep of {runs} runs; confirm it with --yes")
    if not click.confirm(f"This is a sweep of {runs} runs: go on?", err=True):
        raise Failed("nothing was done")


def _refuse_twins(recipes: Sequence[Recipe], found: Sequence[Variant]) -> None:
    """Refuse two runs of a sweep with the same values, however they are written: 1e-3 and 0.001."""
    seen: dict[str, str] = {}
    for recipe, variant in zip(recipes, found, strict=True):
        values = recipe.config.model_dump_json()
        if values in seen:
            raise BadInput(f"sweep: {seen[values]} and {variant.name} are the same run twice")
        seen[values] = variant.name


def why_local(request: Request, clusters: Clusters, planned: PlannedRun) -> str | None:
    """What may surprise about a run of this machine that nobody asked to be one; None: nothing."""
    if request.cluster or clusters.environ.get("MRL_CLUSTER"):
        return None
    if planned.asked_cluster:
        usual = clusters.default or next(iter(clusters.own), LOCAL)
        if usual == LOCAL:
            return None
        where = place_of(planned.recipe, "cluster")
        return f"runs on this machine because {where} says so; --cluster {usual} sends it there"
    if planned.recipe.config.job.device == "cpu" or clusters.default:
        return None
    found = f"no cluster profile in {clusters.file}"
    if clusters.own:
        found = f"{clusters.file} has {', '.join(clusters.own)} and no default:"
    names = ", ".join(name for name in clusters.names() if name != LOCAL)
    return f"{found}, so this means this machine; --cluster NAME or $MRL_CLUSTER names another place ({names})"


def _refuse_contradictions(request: Request) -> None:
    if request.script and not request.dry_run:
        raise BadInput("--script: goes with --dry-run")
    together = ("dry_run", "test_only", "in_allocation", "follow", "detach")
    given = [f"--{name.replace('_', '-')}" for name in together if getattr(request, name)]
    if len(given) > 1:
        raise BadInput(f"{' and '.join(given)}: give one of them")
    if request.script and request.as_json:
        raise BadInput("--script and --json: give one of them; the JSON of a dry run holds the script")
    if request.as_json and (request.follow or request.in_allocation):
        shown = "--follow" if request.follow else "--in-allocation"
        raise BadInput(f"{shown} and --json: give one of them; `mrl status --json` says how a run stands")
