"""What people look at of a step's rollouts, of rank 0's alone: histograms, and some groups as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.agent.api import RolloutGroup


@dataclass(frozen=True, slots=True)
class GroupsView:
    """See `megatron_rl.metrics.writer.RolloutView`."""

    groups: Sequence[RolloutGroup]

    def histograms(self) -> Mapping[str, Sequence[float]]:
        rewards = [[rollout.reward for rollout in group.rollouts] for group in self.groups if group.rollouts]
        return {
            "histograms/rewards": [reward for group in rewards for reward in group],
            "histograms/group_means": [sum(group) / len(group) for group in rewards],
            "histograms/answer_lengths": [len(rollout.tokens) for group in self.groups for rollout in group.rollouts],
        }

    def texts(self, limit: int) -> list[str]:
        return [_text(group) for group in self.groups if group.rollouts][:limit]


def _text(group: RolloutGroup) -> str:
    rollouts = (
        f"  reward {rollout.reward:g}  {rollout.finish_reason}  {rollout.text!r}\n" for rollout in group.rollouts
    )
    return f"prompt {group.ordinal}: {group.problem.prompt!r}\n{''.join(rollouts)}\n"
