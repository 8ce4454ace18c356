"""What one step trains on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.algorithms.advantages import RewardMoments
from megatron_rl.rollout.window import NOTHING_DRAWN, Drawn


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """What one step trains on, as this rank sees it."""

    groups: list[TrajectoryGroup]
    """Those that its replica of the trained model trains on, whole, in ordinal order; the same on every rank of it."""
    positions: list[int]
    """Position of each of them in the global batch: 0, 1, 2, ... in ordinal order."""
    first_ordinal: int
    next_ordinal: int
    dropped: Mapping[int, str] = field(default_factory=dict)
    """Ordinals that this driver has settled without training, and why."""
    dropped_tokens: int = 0
    """Of the answers under way to those that were overdue."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Answers that this driver has lost, by reason, in all groups that the batch settles."""
    rounds: int = 1
    drawn: Drawn = NOTHING_DRAWN
    rewards: RewardMoments | None = None
    """Of all answers of the batch, where the baseline is made of them."""

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
