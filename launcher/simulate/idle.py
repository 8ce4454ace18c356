"""Who waits in a partitioned run, by its record, and whether another split of its nodes should be faster. Needs no
simulation, so that `mrl status` can afford it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.contract.attempt_records import MetricsLine

BUSY = "system/replica_busy_mean"
"""Share of a step in which a replica computed, mean over them; only steps of partitioned runs say it."""
WAITING = ("time/generate_s", "time/reward_s", "time/wait_s")
"""What the training ranks wait for meanwhile."""
WORTH = 0.1
"""Part of a step that another split has to save to be worth a word."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Some steps of a partitioned run, in their mean."""

    steps: int
    step_s: float
    training: float
    """Share of the time in which training ranks waited."""
    inference: float
    """Share of the time in which replicas had nothing to compute."""
    ahead: bool
    """Whether generation ran ahead of training."""


class Better(NamedTuple):
    """A split that should take less time."""

    training_nodes: int
    inference_nodes: int
    saves: float
    """Of the seconds of a step."""


def idle_shares(lines: Sequence[MetricsLine]) -> Idle | None:
    """Who waited in these steps; None where none of them says what replicas did."""
    said = [line.values for line in lines if BUSY in line.values]
    seconds = sum(float(values["time/step_s"]) for values in said)
    if not seconds:
        return None
    waited = sum(float(values.get(part, 0.0)) for values in said for part in WAITING)
    busy = sum(float(values[BUSY]) * float(values["time/step_s"]) for values in said)
    return Idle(
        steps=len(said),
        step_s=seconds / len(said),
        training=min(1.0, waited / seconds),
        inference=min(1.0, max(0.0, 1 - busy / seconds)),
        ahead=any(values.get("staleness_max", 0) for values in said),
    )


def better_split(idle: Idle, nodes: int, inference_nodes: int) -> Better | None:
    """The split that should save most, if that is worth it. By proportion: as if both roles scaled with their nodes,
    which the tail of the longest answers does not; so it is a hint.

    Args:
        nodes: of the run.
        inference_nodes: those of them that generate.
    """
    training_nodes = nodes - inference_nodes
    trained = (1 - idle.training) * training_nodes  # node-seconds, in seconds of a step
    generated = (1 - idle.inference if idle.ahead else idle.training) * inference_nodes

    def step(apart: int) -> float:
        parts = (generated / apart, trained / (nodes - apart))
        return max(parts) if idle.ahead else sum(parts)

    best = min(range(1, nodes), key=step)
    saves = 1 - step(best) / step(inference_nodes)
    return Better(nodes - best, best, saves) if saves >= WORTH else None
