"""What this machine has for a run without Slurm."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("torch", "megatron")


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine, as the ranks of a local run would find it."""

    cpus: int
    """Those that this process may use."""
    gpus: int
    missing: tuple[str, ...]
    """Packages of the ranks that are not installed."""


def inspect() -> Machine:
    """Look, without importing what the ranks import."""
    return Machine(
        cpus=len(os.sched_getaffinity(0)),
        gpus=sum(device.name[6:].isdigit() for device in Path("/dev").glob("nvidia*")),
        missing=tuple(name for name in NEEDED if find_spec(name) is None),
    )
