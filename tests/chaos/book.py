"""Record of the chaos: faults with their phases, runs, recoveries and failures, also as a timeline in a file."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Recovery(NamedTuple):
    seconds: float
    """Seconds from a fault until the run was beyond the step in which it was hit."""
    run: str
    """The run, and its faults until then."""


@dataclass
class Book:
    """Kept by all runs at once."""

    timeline: Path
    began: float = field(default_factory=time.monotonic)
    drawn: Counter[str] = field(default_factory=Counter)
    """Kind of fault -> how often it was drawn."""
    hit: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Kind of fault -> phase -> how often it hit something."""
    recoveries: list[Recovery] = field(default_factory=list)
    resumed: Counter[str] = field(default_factory=Counter)
    """Reason why a run stayed away until its user resumed it -> how often."""
    runs: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Kind of run -> result -> how many."""
    attempts: Counter[str] = field(default_factory=Counter)
    """Outcome and cause of each attempt -> how many."""
    shared_at: float = float("-inf")
    """Time of the monotonic clock of the last fault that hit what all runs share."""
    failures: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def note(self, event: str, **facts: Any) -> None:
        """Append to the timeline."""
        with self._lock, self.timeline.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"s": round(self.seconds(), 1), "event": event, **facts}) + "\n")

    def fail(self, run: str, why: str) -> None:
        self.note("failure", run=run, why=why)
        self.failures.append(f"{run}: {why}")
