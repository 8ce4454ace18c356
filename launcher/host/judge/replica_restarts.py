"""Pure: whether a replica that ended during its attempt starts again, and the verdict on a run without any.

A replica starts again after a pause that doubles with each of its ends. A replica that ran for EARNED_S earns a restart
back, so one that fails once a day never runs out of them. One that fails repeatedly is given up, and so is one with a
wrong configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher.host.judge.verdict import Verdict
from megatron_rl.contract.attempt_records import ReplicaState
from megatron_rl.contract.codes import CRASHED, MISCONFIGURED, REPLICA_GIVEN_UP
from megatron_rl.contract.paths import FIXED, INFER

RESTARTS = 5  # restarts of a replica in one attempt
EARNED_S = 1800.0  # seconds of life that earn one of them back
PAUSE_S = 5.0  # seconds before the first restart
LONGEST_PAUSE_S = 80.0  # seconds
NAMES = {INFER: "inference replica", **{kind: f"replica of the {model}" for kind, model in FIXED.items()}}


class Restart(NamedTuple):
    used: int  # restarts so far, without those that it has earned back
    pause_s: float | None  # seconds until it starts again; None: it is given up


def after_end(used: int, lived_s: float, verdict: Verdict) -> Restart:
    """Whether and when a replica starts again, after `used` restarts and a life of `lived_s` seconds."""
    used = max(0, used - int(lived_s // EARNED_S))
    if verdict.outcome == MISCONFIGURED or used >= RESTARTS:
        return Restart(used, None)
    return Restart(used + 1, min(PAUSE_S * 2**used, LONGEST_PAUSE_S))


def describe(name: str, verdict: Verdict) -> str:
    """`infer-1 rank 0 on node05: RuntimeError: boom`"""
    rank = f" rank {verdict.rank}" if verdict.rank is not None else ""
    node = f" on {verdict.node}" if verdict.node else ""
    return f"{name}{rank}{node}: {verdict.error or verdict.outcome}"


def without_replicas(verdict: Verdict, replicas: Sequence[ReplicaState], kind: str = INFER) -> Verdict:
    """Replace the verdict on an attempt whose training failed because no replica of a kind was left: the replicas' end
    is the cause. Where each of them had a wrong configuration, so has the run."""
    if verdict.outcome != CRASHED or not replicas or any(each.state != REPLICA_GIVEN_UP for each in replicas):
        return verdict
    outcome = MISCONFIGURED if all(each.misconfigured for each in replicas) else CRASHED
    error = f"no {NAMES[kind]} was left: {replicas[0].why}"
    return Verdict(outcome, verdict.step, error, phase=verdict.phase)
