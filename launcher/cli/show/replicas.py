"""The inference replicas of a run that goes on: as data, as a line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.cli.show.history import clock
from launcher.host.record.evidence import read_replicas
from megatron_rl.contract.attempt_records import ReplicaAddress, ReplicaState
from megatron_rl.contract.codes import REPLICA_GIVEN_UP, REPLICA_RUNNING
from megatron_rl.contract.paths import Attempt
from megatron_rl.contract.records import if_readable, read

ANSWERS, STARTS = "answers", "starts"


def replicas_json(attempt: Attempt) -> list[dict[str, Any]]:
    """What is known of each: `state` is answers, starts, waiting or given up, `at` since when (unix time), `why` how it
    ended last, as far as it has."""
    return [_as_json(state, attempt) for state in read_replicas(attempt)]


def _as_json(state: ReplicaState, attempt: Attempt) -> dict[str, Any]:
    address = None
    if state.state == REPLICA_RUNNING:
        address = if_readable(read(ReplicaAddress, attempt.replica(state.replica).listener))
    there = address is not None and address.start + 1 >= state.starts
    return {
        "name": attempt.replica(state.replica).role,
        "state": (ANSWERS if there else STARTS) if state.state == REPLICA_RUNNING else state.state,
        "at": address.at if address is not None and there else state.at or None,
        "address": f"{address.host}:{address.port}" if address is not None and there else None,
        "hosts": list(state.hosts),
        "starts": state.starts,
        "why": state.why,
    }


def replica_lines(told: Sequence[dict[str, Any]], now: float) -> list[str]:
    """`infer-0: answers at 10.0.0.5:40211 for 3:10`; `infer-1: given up after 6 starts, infer-1 rank 0 on node05: ...`.

    Args:
        told: what `replicas_json` returned.
    """
    return [f"{one['name']}: {_line(one, now)}" for one in told]


def _line(one: dict[str, Any], now: float) -> str:
    where = f" at {one['address']}" if one["address"] else f" on {', '.join(one['hosts'])}" if one["hosts"] else ""
    span = f" for {clock(max(0.0, now - one['at']))}" if one["at"] else ""
    if one["state"] == REPLICA_GIVEN_UP:
        return f"given up after {_starts(one)}; {one['why']}"
    again = f", {_starts(one)}; {one['why']}" if one["why"] else ""
    return f"{one['state']}{where}{span}{again}"


def _starts(one: dict[str, Any]) -> str:
    return "1 start" if one["starts"] == 1 else f"{one['starts']} starts"
