"""File descriptors and memory of long-lived processes, sampled while they run, and their growth."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil
from run_processes import BATCH, NURSERY, RANK, REPLICA, processes_of, rank_of

EVERY_S = 5.0
WATCHED = (BATCH, RANK, REPLICA, NURSERY)
LONG_S = 480.0
"""Seconds after which a process counts as long-lived."""
SETTLED = 0.34
"""Share of a life in which caches fill, which is left out."""
MOST_DESCRIPTORS = 8
MOST_MIB_PER_MIN = 2.0
MIB = 2.0**20


@dataclass
class Life:
    role: str
    samples: list[tuple[float, int, float]] = field(default_factory=list)
    """Seconds, file descriptors, MiB."""

    def lasted_s(self) -> float:
        return self.samples[-1][0] - self.samples[0][0]


@dataclass(frozen=True)
class Growth:
    role: str
    minutes: float
    descriptors: float
    """Growth from the middle third of its life to the last third, by medians."""
    descriptors_in_the_end: int
    mib_per_min: float
    mib_in_the_end: float

    def is_flat(self) -> bool:
        return self.descriptors <= MOST_DESCRIPTORS and self.mib_per_min <= MOST_MIB_PER_MIN


class Watch:
    """Samples the processes of one run until it is stopped."""

    def __init__(self, root: Path, samples: Path) -> None:
        """samples: file for all samples, a line each: process id, seconds, descriptors, MiB."""
        self.root = root
        self.samples = samples
        self.lives: dict[tuple[int, float], Life] = defaultdict(lambda: Life(""))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> list[Growth]:
        """Return the growth of each process that lived long, longest first."""
        self._stop.set()
        self._thread.join()
        long = [life for life in self.lives.values() if len(life.samples) > 2 and life.lasted_s() >= LONG_S]
        return [growth_of(life) for life in sorted(long, key=Life.lasted_s, reverse=True)]

    def _sample(self) -> None:
        while not self._stop.wait(EVERY_S):
            for role, processes in processes_of(self.root).items():
                for process in processes:
                    if role in WATCHED:
                        with contextlib.suppress(psutil.Error):
                            life = self.lives[process.pid, process.create_time()]
                            life.role = f"{role} {rank_of(process)}" if role in (RANK, REPLICA) else role
                            memory = process.memory_info().rss / MIB
                            life.samples.append((time.monotonic(), process.num_fds(), memory))
                            with self.samples.open("a") as file:
                                file.write(f"{life.role},{process.pid},{','.join(map(str, life.samples[-1]))}\n")


def growth_of(life: Life) -> Growth:
    """Compare the middle third of a process's life with its last third."""
    settled = life.samples[int(len(life.samples) * SETTLED) :]
    half = len(settled) // 2
    early, late = settled[:half], settled[half:]
    minutes = (median(at for at, _, _ in late) - median(at for at, _, _ in early)) / 60
    descriptors = [median(count for _, count, _ in part) for part in (early, late)]
    memory = [median(mib for _, _, mib in part) for part in (early, late)]
    return Growth(
        life.role,
        life.lasted_s() / 60,
        descriptors[1] - descriptors[0],
        life.samples[-1][1],
        (memory[1] - memory[0]) / minutes if minutes else 0.0,
        life.samples[-1][2],
    )
