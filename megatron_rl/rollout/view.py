"""What people look at of a step's rollouts, of rank 0's alone: histograms, and some groups as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.agent.trajectories import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class GroupsView:
    """See `megatron_rl.metrics.writer.RolloutView`."""

    groups: Sequence[TrajectoryGroup]

    def histograms(self) -> Mapping[str, Sequence[float]]:
        rewards = [[answer.reward for answer in group.trajectories] for group in self.groups if group.trajectories]
        return {
            "histograms/rewards": [reward for group in rewards for reward in group],
            "histograms/group_means": [sum(group) / len(group) for group in rewards],
            "histograms/answer_lengths": [
                answer.answer_length for group in self.groups for answer in group.trajectories
            ],
        }

    def texts(self, limit: int) -> list[str]:
        return [_text(group) for group in self.groups if group.trajectories][:limit]


def _text(group: TrajectoryGroup) -> str:
    answers = (
        f"  reward {answer.reward:g}  {answer.finish_reason}  {answer.text!r}\n" for answer in group.trajectories
    )
    return f"prompt {group.ordinal}: {group.problem.prompt!r}\n{''.join(answers)}\n"
