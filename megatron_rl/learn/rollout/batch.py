"""The batch of one step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.learn.rollout.curriculum import CurriculumState
from megatron_rl.learn.rollout.window import NOTHING_DRAWN, Drawn


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """This rank's part of the batch that one step trains on."""

    groups: list[TrajectoryGroup]
    """Groups that this rank's training replica trains on, whole, in ordinal order; the same on every rank of it."""
    positions: list[int]  # position of each of them in the global batch: 0, 1, 2, ... in ordinal order
    first_ordinal: int
    next_ordinal: int
    dropped: Mapping[int, str] = field(default_factory=dict)
    """Ordinal -> reason, for ordinals that this driver settled without training."""
    passed_over: Sequence[TrajectoryGroup] = ()  # finished groups among `dropped`
    dropped_tokens: int = 0  # tokens of unfinished answers that were cancelled as overdue
    failures: Mapping[str, int] = field(default_factory=dict)
    """Answers that this driver lost, by reason, in all groups that the batch settles."""
    rounds: int = 1
    drawn: Drawn = NOTHING_DRAWN
    curriculum: CurriculumState | None = None
    curriculum_metrics: Mapping[str, float] = field(default_factory=dict)
    firsts: Collection[int] = ()
    """Positions of the first row of each of several sets, which a sampled step records."""
    advantages: Tensor | None = None
    """[trajectories] advantages of the groups, if they depend on the whole batch; None if each group has its own."""

    @property
    def components(self) -> Mapping[str, tuple[float, int]]:
        """Sum of each component of the rewards, by name, and the number of answers that have it."""
        found: dict[str, tuple[float, int]] = {}
        for name, value in (
            part for group in self.groups for answer in group.trajectories for part in answer.components.items()
        ):
            total, answers = found.get(name, (0.0, 0))
            found[name] = total + value, answers + 1
        return found
