"""Idle shares of a partitioned run, from its record, and a split of its nodes that should be faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.contract.attempt_records import MetricsLine

BUSY = "system/replica_busy_mean"
"""Share of a step in which a replica computed, mean over the replicas; only partitioned runs record it."""
WAITING = ("time/generate_s", "time/reward_s", "time/wait_s")
"""Parts of a step in which the training ranks wait."""
WORTH = 0.1
"""Fraction of a step that another split must save to be suggested."""


@dataclass(frozen=True, slots=True)
class Idle:
    steps: int
    step_s: float
    training: float
    """Share of the time in which the training ranks waited."""
    inference: float
    """Share of the time in which the replicas had nothing to compute."""
    ahead: bool
    """Whether generation ran ahead of training."""


class Better(NamedTuple):
    """A split whose steps should be shorter."""

    training_nodes: int
    inference_nodes: int
    saves: float
    """Fraction of the seconds of a step."""


def idle_shares(lines: Sequence[MetricsLine]) -> Idle | None:
    """Return the idle shares in these steps; None if none of them records replicas."""
    recorded = [line.values for line in lines if BUSY in line.values]
    seconds = sum(float(values["time/step_s"]) for values in recorded)
    if not seconds:
        return None
    waited = sum(float(values.get(part, 0.0)) for values in recorded for part in WAITING)
    busy = sum(float(values[BUSY]) * float(values["time/step_s"]) for values in recorded)
    return Idle(
        steps=len(recorded),
        step_s=seconds / len(recorded),
        training=min(1.0, waited / seconds),
        inference=min(1.0, max(0.0, 1 - busy / seconds)),
        ahead=any(values.get("staleness_max", 0) for values in recorded),
    )


def better_split(idle: Idle, nodes: int, inference_nodes: int) -> Better | None:
    """Return the split that should save most, or None if none saves WORTH. This is a hint: it assumes that both roles
    scale with their nodes, which the tail of the longest answers does not.

    Args:
        nodes: all nodes of the run.
        inference_nodes: nodes that generate.
    """
    training_nodes = nodes - inference_nodes
    trained = (1 - idle.training) * training_nodes  # node-seconds, in seconds of a step
    generated = (1 - idle.inference if idle.ahead else idle.training) * inference_nodes

    def step(generating: int) -> float:
        parts = (generated / generating, trained / (nodes - generating))
        return max(parts) if idle.ahead else sum(parts)

    best = min(range(1, nodes), key=step)
    saves = 1 - step(best) / step(inference_nodes)
    return Better(nodes - best, best, saves) if saves >= WORTH else None
