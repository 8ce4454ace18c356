"""Pairs of a better and a worse answer to one problem, for users who train on preferences."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class ContrastivePair:
    """Two answers to one problem. Raises ValueError unless the chosen one has the higher reward."""

    problem: Problem
    chosen: Trajectory
    rejected: Trajectory

    def __post_init__(self) -> None:
        if self.chosen.reward <= self.rejected.reward:
            raise ValueError(
                f"the chosen answer has reward {self.chosen.reward:g}, the rejected one {self.rejected.reward:g}"
            )


def pair_of(group: TrajectoryGroup) -> ContrastivePair | None:
    """The best and the worst answer, of equal ones the first; None where all are worth the same, and where fewer than
    two could be scored."""
    if not group.trajectories:
        return None
    chosen = max(group.trajectories, key=lambda one: one.reward)
    rejected = min(group.trajectories, key=lambda one: one.reward)
    return ContrastivePair(group.problem, chosen, rejected) if chosen.reward > rejected.reward else None
