"""Directories that appear complete or not at all, and the files copied with weights."""

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
from megatron_rl.checkpoint.publish import sync_names
from megatron_rl.recipe.errors import ConfigurationError

CARRIED = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "additional_chat_templates/*.jinja", "LICENSE*")
WRITER = ".writer"  # in a directory being written: the writer's host name; locked meanwhile


@contextmanager
def staged(target: Path, needed_bytes: int, *, replace: bool) -> Iterator[Path]:
    """Yield a new directory that replaces `target` after a successful `with` block, and is deleted after an error.

    .NAME.ID.tmp        being written; debris after a kill, which the next writer of `target` on this host deletes
    .NAME.ID.old.tmp    the old `target` between two renames; the next writer restores it after a kill in between

    Raises:
        ConfigurationError: `target` exists and must not be replaced, cannot be created, or does not fit on its disk.
    """
    if target.name in ("", ".."):
        raise ConfigurationError(f"{target} does not name a new directory: give one with a name")
    clean_up(target)
    if os.path.lexists(target) and not replace:
        raise ConfigurationError(f"{target} exists: give another path, or --force to replace it")
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
    """Rename `folder`. It stays locked until afterwards, so that nobody treats the old directory as debris."""
    old = _replaced_by(folder)
    try:
        if os.path.lexists(target):
            target.rename(old)
        folder.rename(target)
    except BaseException:
        with suppress(OSError):  # there may be none
            old.rename(target)
        raise


def _finish(target: Path, old: Path) -> None:
    """Delete what the new `target` no longer needs. The next writer deletes what cannot be deleted now."""
    with suppress(OSError):
        (target / WRITER).unlink(missing_ok=True)
        sync_names(target.parent)
        _delete(old)


def _replaced_by(folder: Path) -> Path:
    return folder.with_suffix(".old.tmp")


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    writer = os.open(folder / WRITER, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError):  # without locks nobody treats it as abandoned
            fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(writer, _host())
        yield
    finally:
        os.close(writer)


def clean_up(target: Path) -> None:
    """Finish or undo killed writes of `target`: restore what they had moved away and not replaced, delete the rest."""
    mine = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(old\.)?tmp")
    with suppress(OSError):  # a folder that cannot be listed cannot be written either
        left = sorted(path for path in target.parent.iterdir() if mine.fullmatch(path.name))
        for old in (path for path in left if path.name.endswith(".old.tmp")):
            folder = old.with_name(old.name.removesuffix(".old.tmp") + ".tmp")
            if folder in left and not _is_abandoned(folder):
                continue
            if not os.path.lexists(target):
                old.rename(target)
            elif folder not in left:  # the new directory is in place
                _finish(target, old)
        for folder in (path for path in left if not path.name.endswith(".old.tmp")):
            if _is_abandoned(folder) and not os.path.lexists(_replaced_by(folder)):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Whether the process that wrote a directory has certainly ended. Only its own host can know: locks of some file
    systems do not reach other hosts."""
    try:
        writer = os.open(folder / WRITER, os.O_RDWR)
    except OSError:
        return False
    try:
        if os.read(writer, len(_host()) + 1) != _host():
            return False  # if the file is empty, its writer has not locked it yet, and a lock here would prevent that
        fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(writer)


def _host() -> bytes:
    return socket.gethostname().encode()


def carry(source: Path, target: Path) -> None:
    for pattern in CARRIED:
        for file in source.glob(pattern):
            if file.is_file() and file.name != INDEX:
                copy = target / file.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)


def sync(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        sync_names(path)
