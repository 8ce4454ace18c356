"""Directories that appear whole or not at all, and what goes along with weights."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_rl.checkpoint.hf.folder import INDEX
from megatron_rl.errors import ConfigurationError

CARRIED = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "additional_chat_templates/*.jinja", "LICENSE*")
"""Configuration, tokenizer, generation config and chat templates; no weights, no code."""
WRITER = ".writer"
"""File in a directory that is being written: holds the name of the host that writes it, and is locked meanwhile."""


@contextmanager
def staged(target: Path, needed_bytes: int, *, replace: bool) -> Iterator[Path]:
    """A new directory beside `target` that takes its place once all is written, and is deleted where that fails.

    What a kill leaves behind is called .NAME.ID.tmp. The next one for the same place on the same host deletes it.

    Raises:
        ConfigurationError: `target` exists and is not to be replaced, cannot be made, or does not fit on its disk.
    """
    if target.name in ("", ".."):
        raise ConfigurationError(f"{target} names no directory that could be made: give one with a name of its own")
    if os.path.lexists(target) and not replace:
        raise ConfigurationError(f"{target} exists: give another place, or --force to replace it")
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    _delete_abandoned(target)
    try:
        folder.mkdir(parents=True)
        with _locked(folder):
            free = shutil.disk_usage(folder).free
            if free < needed_bytes:
                raise ConfigurationError(
                    f"{target} needs {needed_bytes / 1e9:.1f} GB, and {target.parent} has {free / 1e9:.1f} GB left"
                )
            yield folder
            sync(folder)
            (folder / WRITER).unlink()
            _put_in_place(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _put_in_place(folder: Path, target: Path) -> None:
    old = folder.with_suffix(".old.tmp")
    if os.path.lexists(target):
        target.rename(old)
    try:
        folder.rename(target)
    except BaseException:
        with suppress(OSError):  # there may have been none
            old.rename(target)
        raise
    _sync_names(target.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Have everybody see that a directory is being written."""
    writer = os.open(folder / WRITER, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError):  # a file system without locks: nobody will take it for abandoned
            fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(writer, _host())
        yield
    finally:
        os.close(writer)


def _delete_abandoned(target: Path) -> None:
    """Delete what was to become `target` and whose writer was killed."""
    unfinished = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.tmp")
    with suppress(OSError):  # whoever cannot look there will not write there either
        for path in target.parent.iterdir():
            if unfinished.fullmatch(path.name) and _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Whether the process that wrote a directory has certainly ended. Only its own host can tell: locks of some file
    systems do not reach farther."""
    try:
        writer = os.open(folder / WRITER, os.O_RDWR)
    except OSError:
        return False
    try:
        if os.read(writer, len(_host()) + 1) != _host():
            return False  # nor has its writer locked it yet where it is empty: our lock would keep it from that
        fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(writer)


def _host() -> bytes:
    return socket.gethostname().encode()


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
