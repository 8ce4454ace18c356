"""Read-only queries to git about one directory of a work tree.

They take no lock on the user's repository, ignore the GIT_* variables of a hook that started us, and do not depend on
the user's git configuration of colours, external diffs and untracked files.
"""

from __future__ import annotations

import os
import re
import subprocess
from typing import NamedTuple

from launcher.host.process.limited import run_limited

CALL_LIMIT = 120.0  # seconds for one answer of git: a cold work tree on a busy network file system is slow


class GitError(Exception):
    """git refuses, with this message."""


class WorkTree(NamedTuple):
    top: str
    commit: str | None  # None before the first commit


def work_tree(path: str) -> WorkTree | None:
    """Work tree that holds `path`; None without one or git, or where it ignores the directory. Raises GitError."""
    path = os.path.realpath(path)
    if not below_a_repository(path):  # avoids starting git for every installed package
        return None
    try:
        answer = _run(path, "rev-parse", "--show-toplevel", "HEAD")
    except FileNotFoundError:
        return None
    lines = answer.stdout.decode("utf-8", "surrogateescape").split("\n")
    if answer.returncode != 0 and not lines[0]:
        raise GitError(_complaint(answer))
    top = lines[0]
    commit = lines[1] if len(lines) > 1 and re.match("^[0-9a-f]{40,64}$", lines[1]) else None
    if os.path.realpath(top) != path and _run(top, "check-ignore", "--quiet", path).returncode == 0:
        return None  # for example a virtual environment inside a checkout
    return WorkTree(top, commit)


def tracked(path: str) -> list[str]:
    return _names(_ask(path, "ls-files", "-z"))


def untracked(path: str) -> list[str]:
    """Files below `path` that are neither tracked nor ignored; a nested repository is one entry, with a slash."""
    return _names(_ask(path, "ls-files", "-z", "--others", "--exclude-standard"))


def dirty(path: str) -> bool:
    return bool(_ask(path, "status", "--porcelain", "--untracked-files=normal", "--", "."))


def below_a_repository(path: str) -> bool:
    """Whether `path` or a directory above it holds a `.git`. Raises GitError where that is unknown: treated as outside
    git, ignored files would count as code."""
    while not _is_there(os.path.join(path, ".git")):
        parent = os.path.dirname(path)
        if parent == path:
            return False
        path = parent
    return True


def _is_there(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise GitError(f"{path}: {error.strerror}") from error
    return True


def _names(output: bytes) -> list[str]:
    return [os.fsdecode(name) for name in output.split(b"\0") if name]


def _ask(path: str, *arguments: str) -> bytes:
    answer = _run(path, *arguments)
    if answer.returncode != 0:
        raise GitError(_complaint(answer))
    return answer.stdout


def _run(path: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env.update(GIT_OPTIONAL_LOCKS="0", LC_ALL="C")
    # safe.directory: the repository may belong to another user (a shared installation), and the run executes it anyway.
    try:
        return run_limited(
            ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-C", path, *arguments], CALL_LIMIT, env
        )
    except subprocess.TimeoutExpired:
        raise GitError(f"git {arguments[0]} did not answer within {CALL_LIMIT:.0f} s") from None


def _complaint(answer: subprocess.CompletedProcess[bytes]) -> str:
    text = answer.stderr.decode("utf-8", "replace").strip()
    return " ".join(text.split()) or f"git left with exit code {answer.returncode}"
