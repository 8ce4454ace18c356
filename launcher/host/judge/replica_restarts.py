"""Pure: what becomes of an inference replica that ended while its attempt goes on, and of the run without any.

A replica is started again, after a pause that doubles with every end of its own. Whoever has run for a while has earned
a start back, so what fails once a day never runs out of them; one that fails again and again is given up, and so is one
whose configuration is wrong, which it would be the next time too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher.host.judge.verdict import Verdict
from megatron_rl.contract.attempt_records import ReplicaState
from megatron_rl.contract.codes import CRASHED, MISCONFIGURED, REPLICA_GIVEN_UP

RESTARTS = 5  # that a replica has in one attempt
EARNED_S = 1800.0  # of life, that give one of them back
PAUSE_S = 5.0  # before the first: whatever ended it may pass
LONGEST_PAUSE_S = 80.0


class Restart(NamedTuple):
    """What becomes of a replica that has ended."""

    used: int  # restarts so far, without those that it has earned back
    pause_s: float | None  # until it is started again; None: it is given up


def after_end(used: int, lived_s: float, verdict: Verdict) -> Restart:
    """Whether, and when, a replica is started again.

    Args:
        used: restarts before.
        lived_s: seconds from its last start to its end.
        verdict: how it ended.
    """
    used = max(0, used - int(lived_s // EARNED_S))
    if verdict.outcome == MISCONFIGURED or used >= RESTARTS:
        return Restart(used, None)
    return Restart(used + 1, min(PAUSE_S * 2**used, LONGEST_PAUSE_S))


def describe(name: str, verdict: Verdict) -> str:
    """`infer-1 rank 0 on node05: RuntimeError: boom`"""
    rank = f" rank {verdict.rank}" if verdict.rank is not None else ""
    node = f" on {verdict.node}" if verdict.node else ""
    return f"{name}{rank}{node}: {verdict.error or verdict.outcome}"


def without_replicas(verdict: Verdict, replicas: Sequence[ReplicaState]) -> Verdict:
    """The verdict about an attempt whose training failed because no replica was left: then what ended those is the
    cause, and where each had a wrong configuration, so has the run.

    Args:
        replicas: all that the attempt had.
    """
    if verdict.outcome != CRASHED or not replicas or any(each.state != REPLICA_GIVEN_UP for each in replicas):
        return verdict
    kind = MISCONFIGURED if all(each.misconfigured for each in replicas) else CRASHED
    told = f"no inference replica was left: {replicas[0].why}"
    return Verdict(kind, verdict.step, told, phase=verdict.phase)
