"""Authors of a recipe: a file of another user may set values, and name code or secrets only where you trust it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.errors import BadInput
from launcher.recipe.paths import named_paths
from launcher.recipe.problems import KeyPath
from launcher.recipe.written import RecipeFile, Written
from megatron_rl.contract.files import owner_name
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.registry import used_files

_ROOT = 0
_INCLUDED = ("code", "include")
_FILES = ("code", "program")
"""Marks of keys that name code or a program: a path, or what is installed."""
_COMMANDS = (("notify", "command"), ("harvest", "sbatch"))
_OF_ENVIRONMENTS = ("command", "function")
"""Arguments of an environment, or of a member of one, that name a program or a function."""
_OPTIONS = ("vllm", "args")
_SECRETS = ("token_file", "token_variable")
_SERVERS = (("mlflow", "uri"), ("trackio", "server"))
_RUNS = "would run as you"
_IS_SENT = "would send a secret of yours to the server that is named beside it"
_GETS = "would get your tracker's token and the metrics of the run"


def refuse_code_of_others(config: RunConfig, written: Written) -> None:
    """Raise BadInput for each key of another user's file that names code, a program, options of one, a secret, or
    a server that gets one."""
    authors = {file.name: why for file in written.files if (why := _foreign(file)) is not None}
    if not authors:
        return
    problems = []
    for key, value, effect in _doubtful_keys(config):
        file = written.file_of(key)
        if file is not None and file.name in authors:
            problems.append(
                f"{written.locate(key)[0]}: {'.'.join(key)}: {value!r} {effect}, and {authors[file.name]}: "
                "read it, and then use a copy of your own, or give --trust"
            )
    if problems:
        raise BadInput(problems)


def _foreign(file: RecipeFile) -> str | None:
    if file.folder is None:  # shipped
        return None
    try:
        found = Path(file.name).stat()
    except OSError as error:
        return f"the owner of {file.name} is unknown ({error.strerror})"
    if found.st_uid not in (os.geteuid(), _ROOT):
        return f"{file.name} belongs to {owner_name(found.st_uid)}"
    if stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IWOTH:
        return f"all users can write {file.name}"
    return None


def _doubtful_keys(config: RunConfig) -> Iterator[tuple[KeyPath, Any, str]]:
    """Yield the keys that a stranger must not set, their values, and what these would do."""
    files: set[str] = set()
    for task in _tasks(config):
        with suppress(ValueError):  # bad arguments are reported elsewhere
            files.update(used_files(task))
    for named in named_paths(config):
        is_code = named.mark.kind == "image" or (named.mark.kind in _FILES and "/" in named.value)
        if named.key[:2] == _INCLUDED or named.value in files or is_code:
            yield named.key, named.value, _RUNS
    for key, value in _given(config.model_dump()):
        its_own = "args" in key[:-1] and key[0] in ("environment", "environments") and key[-1] in _OF_ENVIRONMENTS
        if its_own or key in _COMMANDS or key[-3:-1] == _OPTIONS:
            yield key, value, _RUNS
        elif key[-1] in _SECRETS:
            yield key, value, _IS_SENT
        elif key[-2:] in _SERVERS:
            yield key, value, _GETS


def _given(values: Any, key: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield each key and its value, also those of mappings in lists; no value that is null or empty."""
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values) if isinstance(values, list) else ()
    for name, value in pairs:
        if value not in (None, "", [], {}):
            yield (*key, str(name)), value
            yield from _given(value, (*key, str(name)))


def _tasks(config: RunConfig) -> list[EnvironmentConfig]:
    return [*([config.environment] if config.environment else []), *(config.environments or ())]
