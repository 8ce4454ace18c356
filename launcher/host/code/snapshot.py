"""The code of a run: a snapshot in RUN_DIR/code, which every attempt imports from.

    code -> code-001            link, which moves only to a complete snapshot
    code-001/SNAPSHOT.json      sources of all files, and the folders for PYTHONPATH
             launcher/  megatron_rl/  mrl-0.2.0.dist-info/
             1-mine/            files of the first `code.include`, with uncommitted changes
    code-002/                   after `mrl resume --update-code`; the earlier one stays, for the attempts that ran it

A snapshot of a git work tree holds the tracked files as they are on disk, and untracked files that git does not ignore;
of another directory it holds every file. It never holds credentials, byte code, virtual environments or run
directories."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

from launcher.host.code import git
from launcher.host.code.listing import Listing, SnapshotError, ask_git, list_files, refuse_home, tree_of
from megatron_rl.contract.files import names_in
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import ABSENT, PATIENCE_S, Unreadable, read, write
from megatron_rl.contract.run_records import CodeSnapshot, CodeSource

RECORD = RunDir("").code_record.name
METADATA = (".dist-info", ".egg-info")
LIMIT_BYTES = 200 * 10**6  # bytes of all sources together: code, not data


def plan_sources(installed: list[str], include: list[str]) -> list[CodeSource]:
    """List the sources of a snapshot that is not taken yet, and write nothing: directories of importable packages and
    of their `.dist-info`, and the user's, in the order of PYTHONPATH. Raises SnapshotError where one is not a
    directory, or git refuses to read it."""
    sources = []
    for path in installed:
        name = os.path.basename(os.path.realpath(path))
        sources.append(_source(path, name, "metadata" if name.endswith(METADATA) else "package"))
    paths = [os.path.realpath(path) for path in include]
    for number, path in enumerate(sorted(set(paths), key=paths.index), 1):
        name = re.sub("[^A-Za-z0-9._-]", "_", os.path.basename(path)) or "root"
        sources.append(_source(path, f"{number}-{name}", "included"))
    return sources


def _source(path: str, name: str, kind: str) -> CodeSource:
    path = os.path.realpath(path)
    if not os.path.isdir(path):
        raise SnapshotError(f"{path}: no such directory on {socket.gethostname()}")
    tree = None if kind == "metadata" else tree_of(path)  # starting git would slow down a dry run
    if kind == "included":
        refuse_home(path)
        kind = "directory" if tree is None else "git"
    dirty = tree is not None and ask_git(git.dirty, path)
    return CodeSource(path, name, kind, tree.commit if tree else None, dirty)


def take(sources: list[CodeSource], target: Path) -> CodeSnapshot:
    """Make the snapshot `target` unless it exists, and return its record. The caller holds the run's lock. Raises
    SnapshotError, and leaves nothing behind."""
    found = read(CodeSnapshot, target / RECORD, PATIENCE_S)
    if isinstance(found, Unreadable):
        raise SnapshotError(str(found))
    return update(sources, target) if found is ABSENT else found


def update(sources: list[CodeSource], target: Path) -> CodeSnapshot:
    """Make a further snapshot, and move the link `target` to it. Raises as `take`."""
    if target.exists() and not target.is_symlink():
        raise SnapshotError(f"{target} exists and is not a snapshot of mrl; move it away")
    building, link = (target.with_name(f".{target.name}.{kind}.tmp") for kind in ("files", "link"))
    made = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for debris in target.parent.glob(f".{target.name}.*.tmp"):  # of a process that was killed
            shutil.rmtree(debris) if debris.is_dir() and not debris.is_symlink() else debris.unlink()
        matches = [re.match(re.escape(target.name) + r"-([0-9]{3,})$", name) for name in names_in(target.parent)]
        number = max([int(match.group(1)) for match in matches if match] or [0]) + 1
        building.mkdir()
        record = _fill(sources, str(building), number)
        made = building.rename(target.with_name(f"{target.name}-{number:03d}"))
        link.symlink_to(made.name)
        link.replace(target)
    except OSError as error:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        raise SnapshotError(f"{error.filename or target}: {error.strerror}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
        with suppress(OSError):
            link.unlink(missing_ok=True)
    return record


def _fill(sources: list[CodeSource], folder: str, number: int) -> CodeSnapshot:
    listings = [list_files(source.path, os.path.dirname(folder)) for source in sources]
    _refuse_data(sources, listings)
    taken = []
    pythonpath = ["."]
    for source, listing in zip(sources, listings):
        goal = os.path.join(folder, source.name)
        os.mkdir(goal, 0o700)  # private until each folder in it has the mode of its source
        for name in listing.files:
            os.makedirs(os.path.dirname(os.path.join(goal, name)), exist_ok=True)
            _copy(os.path.join(source.path, name), os.path.join(goal, name))
        for name in {os.path.dirname(name) for name in listing.files}:
            _copy_modes(source.path, goal, name)
        if source.kind in ("git", "directory"):
            pythonpath.append(source.name)
            src = os.path.join(goal, "src")
            if os.path.isdir(src) and not os.path.exists(os.path.join(src, "__init__.py")):
                pythonpath.append(source.name + "/src")
        taken.append(_taken(source, listing))
    record = CodeSnapshot(number, time.time(), taken, pythonpath)
    write(os.path.join(folder, RECORD), record)
    _flush(folder)
    return record


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


def _copy(source: str, goal: str) -> None:
    shutil.copyfile(source, goal, follow_symlinks=False)
    if not os.path.islink(goal):
        os.chmod(goal, _mode_of(source))


def _mode_of(source: str) -> int:
    """Mode of a copy. A group that may read the run may write its source, as the umask 002 makes them, but not this: it
    runs as the user."""
    return stat.S_IMODE(os.stat(source).st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH)


def _copy_modes(source: str, goal: str, name: str) -> None:
    """Give a copied folder, and those above it, the modes of their sources, which may be what hides a file."""
    while True:
        os.chmod(os.path.join(goal, name), _mode_of(os.path.join(source, name)) | 0o700)
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
