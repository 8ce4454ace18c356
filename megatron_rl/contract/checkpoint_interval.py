"""Pure: the interval between two saves, from the cost of one and the run's failures.

Young (1974), "A first order approximation to the optimum checkpoint interval", and Daly (2006), "A higher order
estimate of the optimum checkpoint interval for restart dumps", equation 37.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart
from megatron_rl.contract.codes import FINISHED

PRIOR_S = 24 * 3600.0  # prior: one failure per day, with the weight of one observed failure (a Gamma prior of shape 1)


@dataclass(frozen=True)
class SaveCost:
    """Seconds that one save takes."""

    blocked_s: float  # seconds that it stops the training loop
    total_s: float  # seconds from its start to the published checkpoint, including the write beside the loop


@dataclass(frozen=True)
class FailureHistory:
    failures: int  # attempts that ended before the run was finished, for whatever reason
    running_s: float  # seconds of all attempts together

    @property
    def mean_time_between_failures_s(self) -> float:
        return (PRIOR_S + self.running_s) / (1 + self.failures)


def failure_history(ledger: Iterable[AttemptStart | AttemptEnd], now: float) -> FailureHistory:
    """Count the failures in the ledger.

    Args:
        ledger: lines of attempts.jsonl.
        now: unix time; an attempt that has not ended runs until then.
    """
    began: dict[int, float] = {}
    failures, running_s = 0, 0.0
    for line in ledger:
        if isinstance(line, AttemptStart):
            began[line.attempt] = line.at
        elif line.attempt in began:
            lasted_s = max(0.0, line.at - began.pop(line.attempt))
            running_s += lasted_s if line.seconds is None else line.seconds  # as a clock has it that nobody sets
            failures += line.outcome != FINISHED
    return FailureHistory(failures, running_s + sum(max(0.0, now - at) for at in began.values()))


def best_interval_s(cost: SaveCost, mean_time_between_failures_s: float) -> float:
    """Return the seconds between the starts of two saves that minimise the time of saving and repeated work.

    Writing beside the loop costs it nothing, so only the blocked seconds count as cost. But a save cannot start before
    the previous one is done.
    """
    # A save that blocks 2 s, and a failure a day: sqrt(2 * 2 s * 86,400 s), a save every 588 s. Saves then take 2 of
    # 588 seconds, and a failure repeats 294 s of work on average, which is the same 0.34 % of a day.
    blocked, between = cost.blocked_s, mean_time_between_failures_s
    if blocked < 2 * between:
        ratio = blocked / (2 * between)
        # Daly's interval starts at the end of a save and so has a term `- blocked`. This one starts at its start.
        best = math.sqrt(2 * blocked * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9)
    else:
        best = between + blocked
    return max(best, cost.total_s)
