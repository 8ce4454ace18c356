"""Directories that appear complete or not at all, and the files copied with weights."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_rl.checkpoint.hf.folder import INDEX
from megatron_rl.checkpoint.publish import sync_names
from megatron_rl.recipe.errors import ConfigurationError

PATTERNS = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "additional_chat_templates/*.jinja", "LICENSE*")


@contextmanager
def staged(target: Path, needed_bytes: int, *, replace: bool) -> Iterator[Path]:
    """Yield a new directory that replaces `target` after a successful `with` block, and is deleted after an error.

    .NAME.ID.tmp        being written
    .NAME.ID.old.tmp    the old `target`, until the new one is in its place

    A kill may leave either; `mrl convert` names them and says what to do.

    Raises:
        ConfigurationError: `target` exists and must not be replaced, cannot be created, or does not fit on its disk.
    """
    if target.name in ("", ".."):
        raise ConfigurationError(f"{target} does not name a new directory: give one with a name")
    if os.path.lexists(target) and not replace:
        raise ConfigurationError(f"{target} exists: give another path, or --force to replace it")
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    old = folder.with_suffix(".old.tmp")
    try:
        folder.mkdir(parents=True)
        free = shutil.disk_usage(folder).free
        if free < needed_bytes:
            raise ConfigurationError(
                f"{target} needs {needed_bytes / 1e9:.1f} GB, and {target.parent} has {free / 1e9:.1f} GB left"
            )
        yield folder
        for path in [folder, *folder.rglob("*")]:
            sync_names(path)
        if os.path.lexists(target):
            target.rename(old)
        folder.rename(target)
    except BaseException:
        with suppress(OSError):  # there may be none
            old.rename(target)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    with suppress(OSError):
        sync_names(target.parent)
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.unlink(missing_ok=True)


def carry(source: Path, target: Path) -> None:
    for pattern in PATTERNS:
        for file in source.glob(pattern):
            if file.is_file() and file.name != INDEX:
                copy = target / file.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
