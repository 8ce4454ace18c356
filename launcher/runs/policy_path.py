"""Checks of a path to load a policy from, before a command starts a process with torch."""

from __future__ import annotations

from pathlib import Path

from launcher.errors import BadInput
from launcher.fetch.needs import Cache, Need, export
from launcher.runs.find import find, is_run, names_run
from launcher.runs.owner import refuse_others
from megatron_rl.contract.files import seen
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.hf_config import CONFIG_FILE
from megatron_rl.recipe.hub import is_hub_name, package_of

HOLDS = ("manifest.json", CONFIG_FILE)
"""A directory of weights holds one of these files: a checkpoint, Hugging Face weights."""


def prepare_policy(path: str, trusted: bool) -> str:
    """Return the path to load a policy from, which may be a run's directory or name, a checkpoint, a directory of
    Hugging Face weights, their name in the cache of the hub, or package:NAME (exported here). What names no policy is
    refused in milliseconds, instead of in a child in seconds; files are not checked. Raises BadInput, also for another
    user's."""
    if not path.strip():
        raise BadInput("PATH is empty; give a run directory, a checkpoint or a directory of Hugging Face weights")
    try:
        there = Path(path).exists()
    except (OSError, ValueError) as error:
        raise BadInput(f"{path!r}: {getattr(error, 'strerror', None) or error}") from error
    if not there and (run := run_named(path)):
        path, there = str(run.root), True
    if there:
        _check_directory(Path(path).absolute(), trusted)
    elif package := package_of(path):
        cache, need = Cache.of(None), Need("model", path)
        if cache.find(need) is None and not export(need, cache):
            raise BadInput(f"{path} cannot be exported from the Python package {package}: see above")
    elif not is_hub_name(path) or not Cache.of(None).holds(Need("model", path)):
        raise BadInput(
            f"{path}: no such directory, and nothing of that name in the Hugging Face cache; give a run, a "
            "checkpoint, a directory of Hugging Face weights, or package:NAME"
        )
    return path


def run_named(path: str) -> RunDir | None:
    """Run that contains this path or has this name, if any."""
    return find(path) if is_run(path) or (not seen(Path(path).exists) and names_run(path)) else None


def _check_directory(folder: Path, trusted: bool) -> None:
    for root in (folder, folder.parent.parent):  # a run, or a checkpoint of one
        if is_run(str(root)):
            refuse_others(RunDir(root), trusted)
    try:
        if not is_run(str(folder)):
            known = any((folder / name).exists() for name in HOLDS)
        elif not RunDir(folder).checkpoint_steps():
            raise BadInput(f"{folder} has no checkpoint yet; `mrl status {folder}` says what the run does")
        else:
            known = True
    except OSError as error:
        raise BadInput(f"{folder} cannot be read: {error.strerror}") from error
    if not known:
        raise BadInput(
            f"{folder} is neither a run directory (resolved.yaml), nor a checkpoint (manifest.json), nor a directory "
            f"of Hugging Face weights ({CONFIG_FILE})"
        )
