"""One fault that a run under chaos is hit with: what every kind of fault offers to the harness."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab import Cluster
from login import Login, Run

Undo = Callable[[], None]


@dataclass(frozen=True)
class Target:
    """One run under chaos, and the cluster and user it belongs to."""

    lab: Cluster
    login: Login
    run: Run
    run_dir: Path
    phase: Callable[[], str | None]
    """Returns the phase of rank 0 by its heartbeat; None without one."""
    file_faults: Path | None = None
    """Control folder of the library that is preloaded into the run's steps and makes files fail; None without it."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault, such as "cut the network of a replica"."""

    kind: str
    apply: Callable[[Target, random.Random], Undo | None]
    """Hits the run now, and returns the function that ends the fault; None if there is nothing to hit now."""


def nothing_to_undo() -> None:
    """End a fault from which the run itself recovers."""
