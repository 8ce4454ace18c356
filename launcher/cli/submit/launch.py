"""What mrl-submit was asked for -> the run here, or the job there."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import click

from launcher.cluster.choice import LOCAL, Clusters, load_clusters
from launcher.errors import BadInput
from launcher.job.run_directory import run_name
from launcher.recipe.load import Recipe, load_recipe, place_of
from launcher.recipe.sweep import variants


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line of mrl-submit."""

    recipe: str
    overrides: tuple[str, ...] = ()
    cluster: str | None = None
    run_dir: Path | None = None
    change: bool = False
    dry_run: bool = False
    script: bool = False
    as_json: bool = False
    test_only: bool = False
    detach: bool = False
    follow: bool = False
    after: tuple[str, ...] = ()
    max_running: int | None = None
    in_allocation: bool = False
    update_code: bool = False
    """Of `mrl resume` only."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One run of those asked for."""

    recipe: Recipe
    """With the cluster that was chosen."""
    name: str
    """Of its directory, where it gets a new one."""
    given: Path | None
    """The directory it was given."""


def launch(asked: Asked) -> int:
    """Do it; returns the exit code. Raises BadInput."""
    _refuse_contradictions(asked)
    clusters = load_clusters()
    found = variants(asked.overrides)
    recipes = [load_recipe(asked.recipe, variant.overrides) for variant in found]
    chosen = {clusters.choose(asked.cluster, os.environ, recipe.config.cluster) for recipe in recipes}
    if len(chosen) > 1:
        raise BadInput(f"cluster: a sweep goes to one cluster, not to {', '.join(sorted(chosen))}")
    cluster = chosen.pop()
    stem = run_name(recipes[0].config.name, time.localtime())
    planned = []
    for recipe, variant in zip(recipes, found, strict=True):
        placed = replace(recipe, config=recipe.config.model_copy(update={"cluster": cluster}))
        given = asked.run_dir / variant.name if asked.run_dir and variant.name else asked.run_dir
        planned.append(Planned(placed, "_".join(filter(None, (stem, variant.name))), given))
    if cluster == LOCAL:
        from launcher.cli.submit.local import run_here

        _refuse_slurm_only(asked, len(planned))
        if why := _why_here(asked, clusters, planned[0].recipe, recipes[0].config.cluster):
            click.echo(f"note: {why}", err=True)
        return run_here(planned[0], asked)
    from launcher.cli.submit.slurm import run_there

    return run_there(planned, asked, clusters.profile(cluster))


def _why_here(asked: Asked, clusters: Clusters, recipe: Recipe, written: str | None) -> str | None:
    """What may surprise about a run of this machine that nobody asked to be one.

    Args:
        written: `cluster` of the recipe.
    """
    if asked.cluster or os.environ.get("MRL_CLUSTER"):
        return None
    if written:
        usual = clusters.default or next(iter(clusters.own), LOCAL)
        if usual == LOCAL:
            return None
        return f"runs on this machine because {place_of(recipe, 'cluster')} says so; --cluster {usual} sends it there"
    if recipe.config.job.device == "cpu" or clusters.default:
        return None
    found = f"no cluster profile in {clusters.file}"
    if clusters.own:
        found = f"{clusters.file} has {', '.join(clusters.own)} and no default:"
    names = ", ".join(name for name in clusters.names() if name != LOCAL)
    return f"{found}, so this means this machine; --cluster NAME or $MRL_CLUSTER names another place ({names})"


def _refuse_contradictions(asked: Asked) -> None:
    if asked.script and not asked.dry_run:
        raise BadInput("--script: goes with --dry-run")
    together = ("dry_run", "test_only", "in_allocation", "follow", "detach")
    given = [f"--{name.replace('_', '-')}" for name in together if getattr(asked, name)]
    if len(given) > 1:
        raise BadInput(f"{' and '.join(given)}: give one of them")
    if asked.script and asked.as_json:
        raise BadInput("--script and --json: give one of them; the JSON of a dry run holds the script")


def _refuse_slurm_only(asked: Asked, count: int) -> None:
    slurm_only = ("script", "test_only", "follow", "after", "max_running", "in_allocation", "update_code")
    given = [f"--{name.replace('_', '-')}" for name in slurm_only if getattr(asked, name)]
    if given:
        raise BadInput(f"{', '.join(given)}: for Slurm clusters only, and this run is local (--cluster chooses)")
    if count > 1:
        raise BadInput(f"a sweep of {count} runs needs a Slurm cluster; quote a comma that belongs to a value")
    if asked.as_json and not (asked.dry_run or asked.detach):
        raise BadInput("--json: for a local run it goes with --dry-run or --detach")
