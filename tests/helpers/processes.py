"""Processes of whole runs on this machine, and waits for them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from commands import Command
from json_files import read_json_lines
from waiting import until

from megatron_rl.contract.paths import RunDir

LIMIT_S = 300.0


def processes(root: Path, module: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended in the meantime
        if {module.encode(), str(root).encode()} <= set(words):
            found.append(int(folder.name))
    return sorted(found)


def wait_for(what: Callable[[], object]) -> None:
    until(what, limit_s=LIMIT_S)


def wait_for_step(run: RunDir, step: int, command: Command) -> None:
    """Sleep, or return when the command has ended."""
    wait_for(lambda: command.poll() is not None or len(read_json_lines(run.metrics)) >= step)


def hit(run: RunDir, module: str, signum: int, chance: random.Random) -> None:
    """Return a random process of this kind, if there is one."""
    if there := processes(run.root, module):
        os.kill(chance.choice(there), signum)


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "MRL_CACHE": str(tmp_path / "cache")}
