"""The code of a run: a snapshot in RUN_DIR/code, which every attempt imports from.

    code -> code-001            a link that moves only to a whole snapshot
    code-001/SNAPSHOT.json      where everything came from, and what belongs on PYTHONPATH
             launcher/  megatron_rl/  mrl-0.1.0.dist-info/
             1-mine/            files of the first `code.include`, 1-mine.diff its uncommitted changes
    code-002/                   after `mrl resume --update-code`; the earlier one stays, for the attempts that ran it

Of a git work tree: tracked files as they are on disk, and untracked files that git does not ignore. Of anything
else: every file. Never byte code, virtual environments and run directories.
"""

import errno
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

from launcher.host.code import git
from launcher.host.code.listing import Listing, SnapshotError, ask_git, list_files, tree_of
from launcher.host.process.processes import start_time
from megatron_rl.run_dir import read_json, write_json

RECORD = "SNAPSHOT.json"
LIMIT_BYTES = 200 * 10**6  # of all sources together: code, not data
Source = Dict[str, Any]
METADATA = (".dist-info", ".egg-info")


def plan_sources(installed: List[str], include: List[str]) -> List[Source]:
    """What a snapshot would hold: {path, name, kind, commit, dirty} per directory. Writes nothing.

    Args:
        installed: directories of importable packages, and of their `.dist-info`, which tells entry points.
        include: the user's directories, in the order of PYTHONPATH.

    Raises:
        SnapshotError: one of them is no directory, or git refuses to look at it.
    """
    sources = []
    for path in installed:
        name = os.path.basename(os.path.realpath(path))
        sources.append(_source(path, name, "metadata" if name.endswith(METADATA) else "package"))
    paths = [os.path.realpath(path) for path in include]
    for number, path in enumerate(sorted(set(paths), key=paths.index), 1):
        name = re.sub("[^A-Za-z0-9._-]", "_", os.path.basename(path)) or "root"
        sources.append(_source(path, "{}-{}".format(number, name), "included"))
    return sources


def compare(sources: List[Source]) -> List[str]:
    """In words, where a planned source is no longer at the commit it was planned at."""
    moved = []
    for source in sources:
        if source["commit"] is not None:
            now = tree_of(source["path"])
            if now is None or now.commit != source["commit"]:
                commit = (now.commit if now else None) or "no commit"
                said = "{}: was at {} when this was submitted, is at {}"
                moved.append(said.format(source["path"], source["commit"][:12], commit[:12]))
    return moved


def take(sources: List[Source], target: Path) -> Dict[str, Any]:
    """Make the snapshot `target`, once: the record of the one that is there already is returned as it is.

    Of processes that do so at the same time one wins, whole.

    Raises:
        SnapshotError: nothing was left behind, and `target` does not exist.
    """
    target = Path(str(target))
    record = _record_of(target)
    if record is not None:
        return record
    if os.path.lexists(str(target)) and not target.is_symlink():
        raise SnapshotError("{}: is there and is no snapshot of mrl; move it away".format(target))
    number = _newest(target)
    if number == 0:
        number = 1
        _publish(sources, target, number)
    try:
        os.symlink(_numbered(target, number).name, str(target))
    except FileExistsError:
        pass
    record = _record_of(target)
    if record is None:
        raise SnapshotError("{}: leads to no snapshot; remove it and start again".format(target))
    return record


def update(sources: List[Source], target: Path) -> Dict[str, Any]:
    """Make a further snapshot and have `target` lead to it, in one step: until then the old one is untouched.

    Raises:
        SnapshotError: `target` is as it was.
    """
    target = Path(str(target))
    if os.path.lexists(str(target)) and not target.is_symlink():
        raise SnapshotError("{}: is there and is no snapshot of mrl; move it away".format(target))
    number = _newest(target) + 1
    while not _publish(sources, target, number):
        number += 1
    fresh = str(target) + ".{}".format(os.urandom(4).hex())
    os.symlink(_numbered(target, number).name, fresh)
    os.replace(fresh, str(target))
    return dict(_record_of(_numbered(target, number)) or {})


def _source(path: str, name: str, kind: str) -> Source:
    path = os.path.realpath(path)
    if not os.path.isdir(path):
        raise SnapshotError("{}: no such directory on {}".format(path, socket.gethostname()))
    tree = None if kind == "metadata" else tree_of(path)  # starting git takes as long as much of a dry run
    if kind == "included":
        kind = "directory" if tree is None else "git"
    return {
        "path": path,
        "name": name,
        "kind": kind,
        "commit": tree and tree.commit,
        "dirty": tree is not None and ask_git(git.dirty, path),
    }


def _numbered(target: Path, number: int) -> Path:
    return target.with_name("{}-{:03d}".format(target.name, number))


def _newest(target: Path) -> int:
    """Number of the newest whole snapshot, 0 where there is none."""
    names = os.listdir(str(target.parent)) if target.parent.is_dir() else []
    found = [re.match(re.escape(target.name) + r"-(\d{3,})$", name) for name in names]
    numbers = sorted((int(match.group(1)) for match in found if match), reverse=True)
    return next((number for number in numbers if _record_of(_numbered(target, number)) is not None), 0)


def _record_of(snapshot: Path) -> Optional[Dict[str, Any]]:
    try:
        return read_json(snapshot / RECORD)
    except NotADirectoryError:
        return None


def _publish(sources: List[Source], target: Path, number: int) -> bool:
    """Whether the snapshot of this number is ours; False: somebody else's is there, whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    building = "{}.{}.{}.tmp".format(_building(target), os.getpid(), os.urandom(4).hex())
    try:
        os.mkdir(building)
        _fill(sources, building, number)
        os.rename(building, str(_numbered(target, number)))
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise SnapshotError("{}: {}".format(error.filename or target, error.strerror)) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _building(target: Path) -> str:
    return str(target.with_name(".{}.{}".format(target.name, socket.gethostname())))


def _sweep(target: Path) -> None:
    """Remove what processes of this host left half done when they were killed."""
    for path in target.parent.glob(os.path.basename(_building(target)) + ".*.tmp"):
        if start_time(int(path.name.split(".")[-3])) is None:
            shutil.rmtree(str(path), ignore_errors=True)


def _fill(sources: List[Source], folder: str, number: int) -> None:
    listings = [list_files(source["path"], os.path.dirname(folder)) for source in sources]
    _refuse_data(sources, listings)
    entries = []
    pythonpath = ["."]
    for source, listing in zip(sources, listings):
        goal = os.path.join(folder, source["name"])
        os.mkdir(goal)
        for name in listing.files:
            _copy(os.path.join(source["path"], name), os.path.join(goal, name))
        if source["kind"] in ("git", "directory"):
            pythonpath.append(source["name"])
            src = os.path.join(goal, "src")
            if os.path.isdir(src) and not os.path.exists(os.path.join(src, "__init__.py")):
                pythonpath.append(source["name"] + "/src")
        entries.append(_entry(source, listing, folder))
    record = {"snapshot": number, "at": time.time(), "sources": entries, "pythonpath": pythonpath}
    write_json(os.path.join(folder, RECORD), record)
    _flush(folder)


def _entry(source: Source, listing: Listing, folder: str) -> Dict[str, Any]:
    """One source in the record, its uncommitted changes written beside it."""
    tree = tree_of(source["path"])
    commit = tree.commit if tree else None
    text = ask_git(git.diff, source["path"]) if commit else b""
    if text:
        with open(os.path.join(folder, source["name"] + ".diff"), "wb") as file:
            file.write(text)
    notes = list(listing.notes)
    if source["commit"] is not None and commit != source["commit"]:
        notes.append("was at {} when this was submitted".format(source["commit"][:12]))
    return {
        "path": source["path"],
        "name": source["name"],
        "kind": source["kind"],
        "commit": commit,
        "dirty": bool(text or listing.untracked) or (tree is not None and commit is None),
        "diff": source["name"] + ".diff" if text else None,
        "untracked": listing.untracked,
        "files": len(listing.files),
        "bytes": sum(listing.sizes.values()),
        "notes": notes,
    }


def _refuse_data(sources: List[Source], listings: List[Listing]) -> None:
    total = sum(sum(listing.sizes.values()) for listing in listings)
    if total <= LIMIT_BYTES:
        return
    files = [
        (size, os.path.join(source["path"], name))
        for source, listing in zip(sources, listings)
        for name, size in listing.sizes.items()
    ]
    biggest = ["{} ({:.0f} MB)".format(name, size / 1e6) for size, name in sorted(files, reverse=True)[:5]]
    raise SnapshotError(
        "the code to copy is {:.0f} MB, more than {:.0f}; the biggest: {}; have git ignore what is data, or name "
        "smaller directories in code.include".format(total / 1e6, LIMIT_BYTES / 1e6, ", ".join(biggest))
    )


def _copy(source: str, goal: str) -> None:
    os.makedirs(os.path.dirname(goal), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), goal)
    else:
        shutil.copyfile(source, goal)
        shutil.copymode(source, goal)


def _flush(folder: str) -> None:
    """Have the file system that holds `folder` write out everything: one call instead of one fsync per file."""
    import ctypes  # slow, and a dry run gets no further than `plan_sources`

    syncfs = getattr(ctypes.CDLL(None), "syncfs", None)
    if syncfs is None:
        os.sync()
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        syncfs(fd)
    finally:
        os.close(fd)
