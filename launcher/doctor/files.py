"""Whether this process can use the files and directories that a recipe names."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.doctor.finding import Finding, error
from launcher.recipe.load import Recipe, place_of
from launcher.recipe.paths import NamedPath
from megatron_rl.checkpoint.adapters import check_whole
from megatron_rl.checkpoint.publish import MANIFEST, CheckpointError, read_manifest


def file_error(recipe: Recipe, named: NamedPath, path: Path) -> Finding | None:
    """Return an error if a run cannot read a file that it needs; None if it can. This process sees the file at
    `path`."""
    key = ".".join(named.key)
    place = f"{place_of(recipe, key)}: "
    if why := unreadable(path):
        return error("files", f"{place}{key}: {named.path}: {why}", "correct the path")
    if why := _no_initial_weights(recipe, key, path):
        return Finding("error", "files", f"{place}{why}")
    return None


def unreadable(path: Path) -> str | None:
    try:
        path.stat()
    except OSError as refused:
        return (refused.strerror or str(refused)).lower()
    return None if os.access(path, os.R_OK) else "no permission to read it"


def _no_initial_weights(recipe: Recipe, key: str, path: Path) -> str | None:
    """Return why a model cannot start from a checkpoint; None if it can, or if the key names something else."""
    starts = key == "model.checkpoint" and recipe.config.model.init == "checkpoint"
    if not starts and not (key == "distill.teacher" and (path / MANIFEST).is_file()):
        return None
    try:
        check_whole(path, read_manifest(path).meta, key)
    except CheckpointError as unusable:
        return f"{key}: {unusable}"
    except ValueError as refused:
        return str(refused)
    return None
