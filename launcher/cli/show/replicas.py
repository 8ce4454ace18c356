"""States of the replicas of an attempt, and which of them a run waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.host.record.evidence import read_replicas
from megatron_rl.contract.attempt_records import Progress, ReplicaAddress, ReplicaState
from megatron_rl.contract.codes import REPLICA_RUNNING
from megatron_rl.contract.paths import FOLDERS, Attempt, Replica
from megatron_rl.contract.records import if_readable, read

ANSWERS, STARTS = "answers", "starts"


def replicas_json(attempt: Attempt) -> list[dict[str, Any]]:
    """Return the state of each replica: `state` is answers, starts, waiting or given up; `at` since when
    (unix time); `phase` what a start does; `why` how it ended last."""
    return [
        _replica_json(state, attempt.replica(state.replica, kind))
        for kind in FOLDERS
        for state in read_replicas(attempt, kind)
    ]


def waited_for(replicas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replicas of a kind of which none answers, for which the run waits, and those that have ended.

    replicas: returned by `replicas_json`.
    """
    served = {one["kind"] for one in replicas if one["state"] == ANSWERS}
    return [one for one in replicas if one["kind"] not in served or one["state"] not in (ANSWERS, STARTS)]


def _replica_json(state: ReplicaState, files: Replica) -> dict[str, Any]:
    address, progress = None, None
    if state.state == REPLICA_RUNNING:
        address, progress = (
            if_readable(read(ReplicaAddress, files.listener)),
            if_readable(read(Progress, files.progress)),
        )
    there = address is not None and address.start + 1 >= state.starts
    return {
        "name": files.role,
        "kind": files.kind,
        "state": (ANSWERS if there else STARTS) if state.state == REPLICA_RUNNING else state.state,
        "phase": None if there or progress is None else progress.phase,
        "at": address.at if address is not None and there else state.at or None,
        "address": f"{address.host}:{address.port}" if address is not None and there else None,
        "hosts": list(state.hosts),
        "starts": state.starts,
        "why": state.why,
    }
