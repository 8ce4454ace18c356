"""Which code a job needs: mrl as it is installed here, the package of the recipe's environment, and `code.include`."""

from __future__ import annotations

from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launcher.errors import BadInput
from launcher.host.git import GitError, work_tree
from launcher.host.listing import SnapshotError
from launcher.host.snapshot import plan_sources
from megatron_rl.agent.registry import registered
from megatron_rl.config import RunConfig

OURS = ("launcher", "megatron_rl")


def code_sources(config: RunConfig, recipe: Path | None, here: Path) -> list[dict[str, Any]]:
    """What the snapshot of this run is taken from; see launcher.host.snapshot.plan_sources.

    Args:
        recipe: the recipe's file; None for a shipped one.
        here: the current directory, which relative `code.include` paths start from.

    Raises:
        BadInput: an included directory does not exist, or git refuses to look at it.
    """
    include = _included(config, recipe, here)
    try:
        return plan_sources([str(path) for path in _installed(config, include)], [str(path) for path in include])
    except SnapshotError as error:
        raise BadInput(f"code.include: {error}") from error


def _included(config: RunConfig, recipe: Path | None, here: Path) -> list[Path]:
    if config.code.include is not None:
        return [(here / Path(path).expanduser()).resolve() for path in config.code.include]
    if recipe is None:
        return []
    try:
        tree = work_tree(str(here))
    except GitError as error:
        raise BadInput(f"{here}: {error}; or say what to take along with code.include (`[]`: nothing)") from error
    return [Path(tree.top)] if tree and recipe.resolve().is_relative_to(Path(tree.top).resolve()) else []


def _installed(config: RunConfig, include: list[Path]) -> list[Path]:
    """Packages, and the metadata by which their entry points are found."""
    packages = {name: _package(name) for name in OURS}
    metadata = [_metadata(_distribution("mrl"))]
    for entry in registered(config.environment.name):
        top = entry.module.partition(".")[0]
        metadata.append(_metadata(entry.dist))
        package = _package(top)
        if package and not any(package.is_relative_to(path) for path in include):
            packages[top] = package
    found = [*packages.values(), *metadata]
    return list(dict.fromkeys(path for path in found if path is not None))


def _package(name: str) -> Path | None:
    """Directory of an importable package; None for a single module."""
    spec = find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]).resolve() if places else None


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _metadata(dist: Distribution | None) -> Path | None:
    """The dist-info directory of an installed distribution."""
    for file in (dist.files if dist else None) or ():
        if file.name == "METADATA" and file.parent.suffix == ".dist-info":
            return Path(str(file.locate())).parent.resolve()
    return None
