"""Others who can write to a run's directory, read it, or put another one in its place, by the modes of directories."""

from __future__ import annotations

import grp
import os
import stat
from contextlib import suppress
from pathlib import Path

from megatron_rl.contract.files import owner_name


def other_writers(found: os.stat_result) -> str | None:
    """Others who can write into a directory; None if there are none. Many users have a group to themselves, by their
    name."""
    if found.st_mode & stat.S_IWOTH:
        return "all users"
    if not found.st_mode & stat.S_IWGRP:
        return None
    try:
        group = grp.getgrgid(found.st_gid).gr_name
    except KeyError:
        group = str(found.st_gid)
    return None if group == owner_name(found.st_uid) else f"the group {group}"


def warning_of_replacers(root: Path) -> str | None:
    """Return a warning that others can write in a directory above a run's, and so put one of theirs in its place; None
    if they cannot. A sticky bit keeps them from it, and so does a directory further up that its owner alone can enter.
    """
    # No refusal: a project's directories are often a group's. If each run there needed --trust, all would give it, and
    # it also accepts the code that recipes of others name.
    found = None
    for path in dict.fromkeys((root.absolute(), root.resolve())):
        for folder in reversed(path.parents):
            try:
                status = folder.stat()
            except OSError:  # it does not exist yet
                break
            if not status.st_mode & stat.S_ISVTX and (writers := other_writers(status)):
                found = (
                    f"{writers} can write in {folder}, and so replace runs in {root.parent} and their logs: "
                    f"chmod +t {folder} keeps them from it, or give another --run-dir"
                )
            if not status.st_mode & (stat.S_IXGRP | stat.S_IXOTH):
                break
    return found


def warning_of_readers(root: Path) -> str | None:
    """Return a warning that other users can read a directory; None if they cannot, or it does not exist."""
    with suppress(OSError):
        if root.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            return f"other users can read {root}, with prompts, answers and logs of the run; run chmod 700 on it"
    return None
