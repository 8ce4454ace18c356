"""Request of a submission, and the runs that it plans: recipes, names, the cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.cluster.choice import LOCAL, Clusters
from launcher.errors import BadInput
from launcher.fetch.needs import known_caches
from launcher.job.directories import run_name
from launcher.plan.engine_choice import with_engine
from launcher.recipe.load import Recipe, load_recipe, place_of
from launcher.recipe.sweep import Variant, count, variants
from megatron_rl.contract.paths import RunDir

LARGE_SWEEP = 100  # runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Options of mrl-submit, or those that `mrl resume`, `mrl fork` and `launcher.api` derive from theirs."""

    recipe: str
    overrides: tuple[str, ...] = ()
    cluster: str | None = None
    run_dir: Path | None = None
    change: bool = False
    trust: bool = False
    dry_run: bool = False
    script: bool = False
    as_json: bool = False
    detach: bool = False
    follow: bool = False
    after: tuple[str, ...] = ()
    max_running: int | None = None
    in_allocation: bool = False
    yes: bool = False
    """Whether a large sweep is confirmed."""
    update_code: bool = False
    """Take a new snapshot of the code; only set by `mrl resume` and `mrl fork`."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    recipe: Recipe
    name: str
    given: Path | None
    asked_cluster: str | None
    stem: str = ""


def plan_runs(request: Request, clusters: Clusters) -> tuple[str, list[PlannedRun]]:
    """Return the cluster and the runs of a request; more than one for a sweep. Raises BadInput: the recipe, an override
    or the cluster cannot be used, or the options contradict one another."""
    _refuse_contradictions(request)
    if unconfirmed := large_sweep(request):
        raise BadInput(f"this is a sweep of {unconfirmed} runs; confirm it with --yes")
    found = variants(request.overrides)
    if len(found) > 1 and request.run_dir and RunDir(request.run_dir).resolved.exists():
        raise BadInput(
            f"{request.run_dir} holds a run, but {len(found)} runs are requested: give each key one value, and quote a "
            "comma that belongs to a value"
        )
    caches = known_caches(clusters)
    recipes = [load_recipe(request.recipe, variant.overrides, caches, trusted=request.trust) for variant in found]
    _refuse_twins(recipes, found)
    chosen = {clusters.choose(request.cluster, recipe.config.cluster) for recipe in recipes}
    if len(chosen) > 1:
        raise BadInput(f"cluster: a sweep runs on one cluster, not on {', '.join(sorted(chosen))}")
    cluster = chosen.pop()
    profile = None if cluster == LOCAL else clusters.profile(cluster)
    stem = run_name(recipes[0].config.name, time.localtime())
    planned = []
    for recipe, variant in zip(recipes, found, strict=True):
        given = request.run_dir / variant.name if request.run_dir and variant.name else request.run_dir
        engine = with_engine(recipe, profile, caches, None if given is None else RunDir(given))
        placed = replace(engine, config=engine.config.model_copy(update={"cluster": cluster}))
        name = "_".join(filter(None, (stem, variant.name)))
        planned.append(PlannedRun(placed, name, given, recipe.config.cluster, stem))
    return cluster, planned


def large_sweep(request: Request) -> int:
    """Number of runs of a large sweep that nobody has confirmed; 0 for every other request."""
    runs = count(request.overrides)
    return runs if runs > LARGE_SWEEP and not request.yes else 0


def resumption(run: RunDir, overrides: tuple[str, ...] = (), cluster: str | None = None, **others: Any) -> Request:
    """Return the request that resumes a run on its cluster, or on `cluster`. Raises BadInput where its record cannot be
    read. `others`: options of Request."""
    from launcher.runs.state import resolved_values  # imports Slurm's client, which a new local run does not need

    return Request(
        recipe=str(run.resolved),
        overrides=overrides,
        cluster=cluster or str(resolved_values(run).get("cluster") or LOCAL),
        run_dir=run.root,
        change=bool(overrides),
        **others,
    )


def _refuse_twins(recipes: Sequence[Recipe], found: Sequence[Variant]) -> None:
    """Refuse two runs of a sweep with equal values, even if written differently: 1e-3 and 0.001."""
    seen: dict[str, str] = {}
    for recipe, variant in zip(recipes, found, strict=True):
        values = recipe.config.model_dump_json()
        if values in seen:
            raise BadInput(f"sweep: {seen[values]} and {variant.name} are the same run")
        seen[values] = variant.name


def why_local(request: Request, clusters: Clusters, planned: PlannedRun) -> str | None:
    """Explain why a run that was not asked to be local is local; None: no explanation needed."""
    if request.cluster or clusters.environ.get("MRL_CLUSTER"):
        return None
    if planned.asked_cluster:
        usual = clusters.default or next(iter(clusters.own), LOCAL)
        if usual == LOCAL:
            return None
        where = place_of(planned.recipe, "cluster")
        return f"runs on this machine because {where} says so; --cluster {usual} runs it there"
    if planned.recipe.config.job.device == "cpu" or clusters.default:
        return None
    found = f"no cluster profile in {clusters.file}"
    if clusters.own:
        found = f"{clusters.file} has {', '.join(clusters.own)} but sets no default"
    names = ", ".join(name for name in clusters.names() if name != LOCAL)
    return f"{found}, so it runs on this machine; --cluster NAME or $MRL_CLUSTER chooses another cluster ({names})"


def _refuse_contradictions(request: Request) -> None:
    if request.script and not request.dry_run:
        raise BadInput("--script: add --dry-run")
    together = ("dry_run", "in_allocation", "follow", "detach")
    given = [f"--{name.replace('_', '-')}" for name in together if getattr(request, name)]
    if len(given) > 1:
        raise BadInput(f"{' and '.join(given)} exclude each other")
    if request.script and request.as_json:
        raise BadInput("--script and --json exclude each other; the JSON of a dry run has the script")
    if request.as_json and (request.follow or request.in_allocation):
        shown = "--follow" if request.follow else "--in-allocation"
        raise BadInput(f"{shown} and --json exclude each other; `mrl status --json` shows the state of a run")
