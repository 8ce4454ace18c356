"""Directories that a snapshot is taken of, with their commits at the time of the submission."""

from __future__ import annotations

import os
import re
import socket

from launcher.host.code import git
from launcher.host.code.listing import SnapshotError, ask_git, refuse_home, tree_of
from megatron_rl.contract.run_records import CodeSource

METADATA = (".dist-info", ".egg-info")


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
