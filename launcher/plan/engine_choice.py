"""Choice of the engine for `inference.engine: auto`, and of the vLLM that a cluster's profile names."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from launcher.cluster.choice import Clusters
from launcher.cluster.profile import Profile
from launcher.errors import BadInput
from launcher.plan.summary import fullest_gpu, gpu_bytes, make_plan, with_offload
from launcher.recipe.load import Recipe, load_recipe, read_resolved
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.engines import AUTO


def load_for(
    asked: str,
    overrides: Sequence[str],
    clusters: Clusters,
    cluster: str | None,
    caches: Sequence[Path] = (),
    *,
    trusted: bool,
) -> tuple[Recipe, str, Profile | None]:
    """Load a recipe for a cluster, with the engine that it will have there. Returns it with the cluster's name and
    profile; None for this machine. Raises BadInput.

    Args:
        cluster: name that the user gives, instead of the recipe's.
        caches, trusted: as for `load_recipe`.
    """
    recipe = load_recipe(asked, overrides, caches, trusted=trusted)
    name, profile = clusters.choose_profile(cluster, recipe.config.cluster)
    return with_engine(recipe, profile, caches), name, profile


def with_engine(recipe: Recipe, profile: Profile | None, caches: Sequence[Path], run: RunDir | None = None) -> Recipe:
    """Return the recipe with its engine chosen, and with the profile's vLLM where it has none.

    Args:
        run: directory of the run; one that has begun keeps its engine.
    """
    config, asks = recipe.config, _asks(recipe)
    if config.job.device == "cpu" or config.supervised or (config.inference.engine != "vllm" and not asks):
        return recipe
    if run is not None and run.resolved.is_file():
        recorded = read_resolved(run.resolved).inference.engine
        if asks and recorded != config.inference.engine:
            return _loaded(recipe, [f"inference.engine={recorded}"], profile, caches, "this run has begun with it")
        return recipe
    found = _found(profile)
    if config.inference.engine == "vllm":
        if found is None or config.inference.vllm is not None:
            return replace(recipe, engine_because="the recipe says where it is") if asks else recipe
        return _loaded(recipe, [], profile, caches, None)
    if found is None:
        missing = "the profile names no vLLM" if profile else "the Python of the ranks has no vLLM"
        return replace(recipe, engine_because=f"{missing}, and inference.vllm is not given")
    try:
        chosen = _loaded(recipe, ["inference.engine=vllm"], profile, caches, found)
        needed, limit = _needed(chosen, profile), gpu_bytes(config, profile)
        if limit is None or needed <= limit or _needed(recipe, profile) > limit:
            return chosen
        why = f"with vLLM a GPU would need {needed / 2**30:.3g} of its {limit / 2**30:.3g} GiB"
    except BadInput as refused:
        why = refused.problems[0]
    return replace(recipe, engine_because=f"{found}, but {why}")


def _asks(recipe: Recipe) -> bool:
    section = recipe.written.values.get("inference") or {}
    return section.get("engine", AUTO) == AUTO


def _found(profile: Profile | None) -> str | None:
    """Say where a vLLM is; None if there is none."""
    if profile is not None and profile.vllm is not None:
        return f"the profile names {profile.vllm.image or profile.vllm.python}"
    if profile is None or (profile.container is None and profile.python is None):
        with suppress(importlib.metadata.PackageNotFoundError):
            return f"the Python of the ranks has vLLM {importlib.metadata.version('vllm')}"
    return None


def _loaded(
    recipe: Recipe, more: Sequence[str], profile: Profile | None, caches: Sequence[Path], because: str | None
) -> Recipe:
    """Load a recipe again with more overrides, which the command that resumes its run repeats."""
    loaded = load_recipe(recipe.asked, [*recipe.overrides, *more, *_of_profile(recipe, profile)], caches, trusted=True)
    return replace(loaded, engine_because=because)


def _of_profile(recipe: Recipe, profile: Profile | None) -> Iterator[str]:
    if profile is None or profile.vllm is None or recipe.config.inference.vllm is not None:
        return
    for key in ("image", "python"):
        if value := getattr(profile.vllm, key):
            yield f"inference.vllm.{key}={value}"


def _needed(recipe: Recipe, profile: Profile | None) -> int:
    """Bytes that the fullest GPU needs. Raises BadInput: the layout is impossible."""
    plan = make_plan(recipe, profile)
    return fullest_gpu(with_offload(recipe.config, plan, profile), plan.sizes) or 0


def note_of(recipe: Recipe) -> str | None:
    """Sentence about the choice; None without one."""
    if recipe.engine_because is None:
        return None
    return f"inference.engine auto is {recipe.config.inference.engine}: {recipe.engine_because}"
