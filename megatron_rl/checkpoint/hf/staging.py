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

    .NAME.ID.tmp        being written; after a kill debris, which the next one for that place on the same host deletes
    .NAME.ID.old.tmp    what `target` was, between two renames; after a kill between them the next one puts it back

    Raises:
        ConfigurationError: `target` exists and is not to be replaced, cannot be made, or does not fit on its disk.
    """
    if target.name in ("", ".."):
        raise ConfigurationError(f"{target} names no directory that could be made: give one with a name of its own")
    clean_up(target)
    if os.path.lexists(target) and not replace:
        raise ConfigurationError(f"{target} exists: give another place, or --force to replace it")
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
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
            _put_in_place(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _finish(target, _replaced_by(folder))


def _put_in_place(folder: Path, target: Path) -> None:
    """Rename `folder`, which is locked until after that: nobody takes what was there before for left behind."""
    old = _replaced_by(folder)
    try:
        if os.path.lexists(target):
            target.rename(old)
        folder.rename(target)
    except BaseException:
        with suppress(OSError):  # there may have been none
            old.rename(target)
        raise


def _finish(target: Path, old: Path) -> None:
    """Delete what the new `target` has no more use for. What cannot be deleted now the next one deletes."""
    with suppress(OSError):
        (target / WRITER).unlink(missing_ok=True)
        _sync_names(target.parent)
        _delete(old)


def _replaced_by(folder: Path) -> Path:
    """Where what a new directory replaces is, until that one is in its place."""
    return folder.with_suffix(".old.tmp")


def _delete(path: Path) -> None:
    """Delete a directory or a file, as far as that goes."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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


def clean_up(target: Path) -> None:
    """Finish or undo what those were at that were to become `target` and whose writers were killed: put back what they
    had taken away and not replaced, delete the rest."""
    mine = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(old\.)?tmp")
    with suppress(OSError):  # whoever cannot look there will not write there either
        left = sorted(path for path in target.parent.iterdir() if mine.fullmatch(path.name))
        for old in (path for path in left if path.name.endswith(".old.tmp")):
            folder = old.with_name(old.name.removesuffix(".old.tmp") + ".tmp")
            if folder in left and not _is_abandoned(folder):
                continue
            if not os.path.lexists(target):
                old.rename(target)
            elif folder not in left:  # it has taken its place
                _finish(target, old)
        for folder in (path for path in left if not path.name.endswith(".old.tmp")):
            if _is_abandoned(folder) and not os.path.lexists(_replaced_by(folder)):
                shutil.rmtree(folder, ignore_errors=True)


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
