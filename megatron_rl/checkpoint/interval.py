"""Pure: how long to wait between two saves, from what one costs and how often the run fails.

Young (1974), "A first order approximation to the optimum checkpoint interval", and Daly (2006), "A higher order
estimate of the optimum checkpoint interval for restart dumps", equation 37.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart
from megatron_rl.contract.codes import FINISHED

PRIOR_S = 24 * 3600.0
"""Where nothing is known: one failure a day. It weighs as much as one failure seen (a Gamma prior of shape 1)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one save takes."""

    blocked_s: float
    """How long it keeps the training loop."""
    total_s: float
    """From its start to the published checkpoint; the write behind the loop included."""


@dataclass(frozen=True, slots=True)
class FailureHistory:
    """What became of the attempts of a run."""

    failures: int
    """Those that ended before the run was finished: crashes, dead nodes, preemptions, time limits, stops."""
    running_s: float
    """Of all attempts together."""

    @property
    def mean_time_between_failures_s(self) -> float:
        return (PRIOR_S + self.running_s) / (1 + self.failures)


def failure_history(ledger: Iterable[AttemptStart | AttemptEnd], now: float) -> FailureHistory:
    """
    Args:
        ledger: lines of attempts.jsonl.
        now: unix seconds; an attempt that has not ended runs until then.
    """
    began: dict[int, float] = {}
    failures, running_s = 0, 0.0
    for line in ledger:
        if isinstance(line, AttemptStart):
            began[line.attempt] = line.at
        elif line.attempt in began:
            running_s += max(0.0, line.at - began.pop(line.attempt))
            failures += line.outcome != FINISHED
    return FailureHistory(failures, running_s + sum(max(0.0, now - at) for at in began.values()))


def best_interval_s(cost: Cost, mean_time_between_failures_s: float) -> float:
    """Seconds from the start of one save to that of the next, so that saving and repeated work take least time.

    What is written behind the loop costs the loop nothing, so only the blocked seconds count as cost; but a save
    cannot begin before the one under way is done.
    """
    blocked, between = cost.blocked_s, mean_time_between_failures_s
    if blocked < 2 * between:
        ratio = blocked / (2 * between)
        # Daly's interval runs from the end of a save: it has `- blocked` where this one has not.
        best = math.sqrt(2 * blocked * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9)
    else:
        best = between + blocked
    return max(best, cost.total_s)
