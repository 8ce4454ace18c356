"""Directories that appear whole or not at all, and what goes along with weights."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_rl.checkpoint.hf.folder import INDEX
from megatron_rl.errors import ConfigurationError

CARRIED = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "additional_chat_templates/*.jinja", "LICENSE*")
"""Configuration, tokenizer, generation config and chat templates; no weights, no code."""


@contextmanager
def staged(target: Path, needed_bytes: int, *, replace: bool) -> Iterator[Path]:
    """A new directory beside `target` that takes its place once all is written, and is deleted where that fails.

    What a kill leaves behind is called .NAME.ID.tmp.

    Raises:
        ConfigurationError: `target` exists and is not to be replaced, cannot be made, or does not fit on its disk.
    """
    if os.path.lexists(target) and not replace:
        raise ConfigurationError(f"{target} exists: give another place, or --force to replace it")
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        folder.mkdir(parents=True)
        free = shutil.disk_usage(folder).free
        if free < needed_bytes:
            raise ConfigurationError(
                f"{target} needs {needed_bytes / 1e9:.1f} GB, and {target.parent} has {free / 1e9:.1f} GB left"
            )
        yield folder
        sync(folder)
        old = folder.with_suffix(".old.tmp")
        if os.path.lexists(target):
            target.rename(old)
        folder.rename(target)
        _sync_names(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def carry(source: Path, target: Path) -> None:
    """Copy what goes along with the weights in `source`, byte for byte."""
    for pattern in CARRIED:
        for file in source.glob(pattern):
            if file.is_file() and file.name != INDEX:
                copy = target / file.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)


def sync(folder: Path) -> None:
    """Make all files in `folder` durable, and their names."""
    for path in [folder, *folder.rglob("*")]:
        _sync_names(path)


def _sync_names(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
