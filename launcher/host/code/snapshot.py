"""The code of a run: a snapshot in RUN_DIR/code, which every attempt imports from.

    code -> code-001            link, which moves only to a complete snapshot
    code-001/SNAPSHOT.json      sources of all files, and the folders for PYTHONPATH
             launcher/  megatron_rl/  mrl-0.1.0.dist-info/
             1-mine/            files of the first `code.include`, with uncommitted changes
    code-002/                   after `mrl resume --update-code`; the earlier one stays, for the attempts that ran it

A snapshot of a git work tree holds the tracked files as they are on disk, and untracked files that git does not ignore;
of another directory it holds every file. It never holds credentials, byte code, virtual environments or run
directories."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import stat
import time
from pathlib import Path

from launcher.host.code import git
from launcher.host.code.listing import Listing, SnapshotError, ask_git, list_files, tree_of
from launcher.host.process.processes import start_time
from megatron_rl.contract.files import names_in
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import (
    ABSENT,
    PATIENCE_S,
    Found,
    Unreadable,
    UnreadableRecord,
    if_readable,
    read,
    write,
)
from megatron_rl.contract.run_records import CodeSnapshot, CodeSource

RECORD = RunDir("").code_record.name
LIMIT_BYTES = 200 * 10**6  # bytes of all sources together: code, not data


def take(sources: list[CodeSource], target: Path) -> CodeSnapshot:
    """Make the snapshot `target` unless it exists, and return its record. Of several processes one makes it. Raises
    SnapshotError, and leaves nothing behind; its cause is an OSError where the file system fails now and here."""
    target = Path(target)
    found = _record_of(target, PATIENCE_S)
    if found is ABSENT:
        _refuse_foreign(target)
        _link(sources, target)
        found = _record_of(target, PATIENCE_S)
    if found is ABSENT:
        raise SnapshotError(f"{target} leads to no snapshot; remove it and start again")
    if isinstance(found, Unreadable):
        raise SnapshotError(str(found)) from UnreadableRecord(str(found))
    return found


def update(sources: list[CodeSource], target: Path) -> CodeSnapshot:
    target = Path(target)
    _refuse_foreign(target)
    number = max(_records(target), default=0) + 1
    while not _publish(sources, target, number):
        number += 1
    fresh = Path(f"{target}.{os.urandom(4).hex()}")
    try:
        fresh.symlink_to(_numbered(target, number).name)
        fresh.replace(target)
    except OSError as error:
        if fresh.is_symlink():
            fresh.unlink()
        shutil.rmtree(_numbered(target, number), ignore_errors=True)
        raise SnapshotError(f"{target}: {error.strerror}") from error
    return take(sources, target)


def _link(sources: list[CodeSource], target: Path) -> None:
    records = _records(target)
    whole = [number for number, found in records.items() if if_readable(found) is not None]
    for found in records.values():
        if isinstance(found, Unreadable) and not whole:
            raise SnapshotError(str(found))
    if not whole:
        _publish(sources, target, 1)
    with contextlib.suppress(FileExistsError):
        target.symlink_to(_numbered(target, max(whole, default=1)).name)


def _refuse_foreign(target: Path) -> None:
    if target.exists() and not target.is_symlink():
        raise SnapshotError(f"{target} exists and is not a snapshot of mrl; move it away")


def _numbered(target: Path, number: int) -> Path:
    return target.with_name(f"{target.name}-{number:03d}")


def _records(target: Path) -> dict[int, Found[CodeSnapshot]]:
    """Number of each snapshot beside `target` -> its record, which may be Unreadable."""
    names = names_in(target.parent)
    matches = [re.match(re.escape(target.name) + r"-([0-9]{3,})$", name) for name in names]
    numbers = [int(match.group(1)) for match in matches if match]
    records = {number: _record_of(_numbered(target, number)) for number in numbers}
    return {number: found for number, found in records.items() if found is not ABSENT}


def _record_of(snapshot: Path, patience: float = 0.0) -> Found[CodeSnapshot]:
    return read(CodeSnapshot, snapshot / RECORD, patience)


def _publish(sources: list[CodeSource], target: Path, number: int) -> bool:
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_debris(target)
    building = f"{_building(target)}.{os.getpid()}.{os.urandom(4).hex()}.tmp"
    try:
        os.mkdir(building)
        _fill(sources, building, number)
        os.rename(building, str(_numbered(target, number)))
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise SnapshotError(f"{error.filename or target}: {error.strerror}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _building(target: Path) -> str:
    return str(target.with_name(f".{target.name}.{socket.gethostname()}"))


def _remove_debris(target: Path) -> None:
    for path in target.parent.glob(os.path.basename(_building(target)) + ".*.tmp"):
        if start_time(int(path.name.split(".")[-3])) is None:
            shutil.rmtree(str(path), ignore_errors=True)


def _fill(sources: list[CodeSource], folder: str, number: int) -> None:
    listings = [list_files(source.path, os.path.dirname(folder)) for source in sources]
    _refuse_data(sources, listings)
    taken = []
    pythonpath = ["."]
    for source, listing in zip(sources, listings):
        goal = os.path.join(folder, source.name)
        os.mkdir(goal, 0o700)  # private until each folder in it has the mode of its source
        for name in listing.files:
            os.makedirs(os.path.dirname(os.path.join(goal, name)), exist_ok=True)
            shutil.copy(os.path.join(source.path, name), os.path.join(goal, name), follow_symlinks=False)
        for name in {os.path.dirname(name) for name in listing.files}:
            _copy_modes(source.path, goal, name)
        if source.kind in ("git", "directory"):
            pythonpath.append(source.name)
            src = os.path.join(goal, "src")
            if os.path.isdir(src) and not os.path.exists(os.path.join(src, "__init__.py")):
                pythonpath.append(source.name + "/src")
        taken.append(_taken(source, listing))
    write(os.path.join(folder, RECORD), CodeSnapshot(number, time.time(), taken, pythonpath))
    _flush(folder)


def _taken(source: CodeSource, listing: Listing) -> CodeSource:
    tree = tree_of(source.path)
    commit = tree.commit if tree else None
    return source._replace(
        commit=commit,
        dirty=tree is not None and (commit is None or ask_git(git.dirty, source.path)),
        untracked=listing.untracked,
        files=len(listing.files),
        bytes=sum(listing.sizes.values()),
        notes=list(listing.notes),
    )


def _copy_modes(source: str, goal: str, name: str) -> None:
    """Give a copied folder, and those above it, the modes of their sources, which may be what hides a file."""
    while True:
        mode = stat.S_IMODE(os.stat(os.path.join(source, name)).st_mode)
        os.chmod(os.path.join(goal, name), mode | 0o700)
        if not name:
            return
        name = os.path.dirname(name)


def _refuse_data(sources: list[CodeSource], listings: list[Listing]) -> None:
    total = sum(sum(listing.sizes.values()) for listing in listings)
    if total <= LIMIT_BYTES:
        return
    files = [
        (size, os.path.join(source.path, name))
        for source, listing in zip(sources, listings)
        for name, size in listing.sizes.items()
    ]
    biggest = [f"{name} ({size / 1e6:.0f} MB)" for size, name in sorted(files, reverse=True)[:5]]
    raise SnapshotError(
        f"the code to copy is {total / 1e6:.0f} MB, more than {LIMIT_BYTES / 1e6:.0f}; the biggest files: "
        f"{', '.join(biggest)}; have git ignore data, or name smaller directories in code.include"
    )


def _flush(folder: str) -> None:
    """Flush the file system that holds `folder`, with one call instead of an fsync per file."""
    import ctypes  # slow, and a dry run only plans the sources

    syncfs = getattr(ctypes.CDLL(None), "syncfs", None)
    if syncfs is None:
        os.sync()
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        syncfs(fd)
    finally:
        os.close(fd)
