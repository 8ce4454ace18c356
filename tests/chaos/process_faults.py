"""Signals to any process of a run: ended, frozen, or asked to leave."""

from __future__ import annotations

import contextlib
import random
import signal

import psutil
from fault import Fault, Target, Undo
from run_processes import BATCH, DAEMON, NURSERY, OTHER, PROGRAM, RANK, REPLICA, SRUN, SUPERVISOR, processes_of

ROLES = (RANK, REPLICA, BATCH, SRUN, DAEMON, NURSERY, SUPERVISOR, PROGRAM, OTHER)
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)


def _fault(role: str, signum: signal.Signals) -> Fault:
    def hit(target: Target, chance: random.Random) -> Undo | None:
        victims = processes_of(target.run_dir).get(role, [])
        victims.sort(key=lambda process: process.pid)
        while victims:
            victim = victims.pop(chance.randrange(len(victims)))
            with contextlib.suppress(psutil.Error):  # it has ended in the meantime
                victim.send_signal(signum)
                return lambda: _wake(victim) if signum == signal.SIGSTOP else None
        return None

    return Fault(f"{signum.name} of a {role}", hit)


def _wake(victim: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        victim.send_signal(signal.SIGCONT)


FAULTS = tuple(_fault(role, signum) for role in ROLES for signum in SIGNALS)
THEIRS = (NURSERY, SUPERVISOR, PROGRAM, OTHER)
"""Roles of processes whose end may cost an answer, which is then lost and not sampled again."""
MAY_LOSE_ANSWERS = frozenset(f"{signum.name} of a {role}" for role in THEIRS for signum in SIGNALS)
