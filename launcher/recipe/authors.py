"""Authors of a recipe: a file of another user may set values, and name code only where you trust it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
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
_CODE = ("code", "program", "image")
"""Marks of keys that name code, a program or an image with both."""
_COMMANDS = ("command", "function")
"""Arguments of an environment that name a program or a function."""


def refuse_code_of_others(config: RunConfig, written: Written) -> None:
    """Raise BadInput for each key of another user's file that names code, a program or options of one."""
    authors = {file.name: why for file in written.files if (why := _foreign(file)) is not None}
    if not authors:
        return
    problems = []
    for key, value in _code_keys(config):
        file = written.file_of(key)
        if file is not None and file.name in authors:
            problems.append(
                f"{written.locate(key)[0]}: {'.'.join(key)}: {value!r} would run as you, and {authors[file.name]}: "
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


def _code_keys(config: RunConfig) -> Iterator[tuple[KeyPath, Any]]:
    files: set[str] = set()
    for place, task in _tasks(config):
        files.update(used_files(task))
        for name in _COMMANDS:
            if task.args.get(name):
                yield (*place, "args", name), task.args[name]
    for named in named_paths(config):
        if named.key[:2] == _INCLUDED or named.value in files or (named.mark.kind in _CODE and "/" in named.value):
            yield named.key, named.value
    if config.inference.vllm and config.inference.vllm.args:
        yield ("inference", "vllm", "args"), config.inference.vllm.args


def _tasks(config: RunConfig) -> Iterator[tuple[KeyPath, EnvironmentConfig]]:
    if config.environment is not None:
        yield ("environment",), config.environment
    for number, one in enumerate(config.environments or ()):
        yield ("environments", str(number)), one
