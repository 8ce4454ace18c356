"""From an ordinal to its scored group, and from the groups of all drivers to the batch of a step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch

from megatron_rl.agent.api import GroupedRolloutGenerator, GroupRolloutRequest, TrainingSet
from megatron_rl.agent.keys import group_key
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.algorithms.advantages import RewardMoments
from megatron_rl.algorithms.signal import GroupRewards, group_rewards, has_signal
from megatron_rl.config import RunConfig
from megatron_rl.inference.api import PromptTooLong
from megatron_rl.rank.groups import Groups
from megatron_rl.rollout.bank.recording import Recording
from megatron_rl.rollout.batch import RolloutBatch
from megatron_rl.rollout.exchange import Gather, exchange
from megatron_rl.rollout.mixture import Mixture
from megatron_rl.rollout.window import NOTHING_DRAWN, Drawn, State

logger = logging.getLogger(__name__)


class Answering:
    """What the agent makes of the ordinals of the prompt stream."""

    def __init__(self, agent: GroupedRolloutGenerator, sets: Sequence[TrainingSet], config: RunConfig) -> None:
        """sets: of the agent's problems, those that are trained on."""
        self.config = config
        self.stream = Mixture(sets, config.training.seed, config.grpo.prompts_per_step)
        self.answered = 0
        """Groups so far."""
        self._agent = agent

    async def group(self, ordinal: int, recording: Recording) -> TrajectoryGroup | None:
        """The group of an ordinal; None where its prompt is too long."""
        request = GroupRolloutRequest(
            ordinal=ordinal,
            problem=self.stream.problem(ordinal),
            group_size=self.config.grpo.group_size,
            sampling=self.config.sampling,
            key=group_key(self.config.training.seed, ordinal, 0, recording.policy_version(ordinal)),
            inference=recording,
            limits=RolloutLimits.of(self.config.task),
        )
        try:
            group = await self._agent.group_rollout(request)
        except PromptTooLong as error:
            logger.warning("prompt %d is dropped: %s", ordinal, error)
            return None
        self.answered += 1
        recording.add(group)
        return group

    def state(self, group: TrajectoryGroup | None, dynamic: bool) -> State:
        """State of an answered ordinal.

        Signal is judged by the rewards as scored, as DAPO filters by accuracy: among answers that are all wrong, a
        penalty on long ones teaches length alone.

        Args:
            group: None where the prompt is too long.
            dynamic: whether a group without signal is passed over.
        """
        if group is None:
            return State.UNUSABLE
        if dynamic:
            rewards = self._rewards([group])
            if not has_signal(rewards.scored, rewards.group, 1).item():
                return State.NO_SIGNAL
        return State.USABLE

    def batch(
        self,
        made: Mapping[int, TrajectoryGroup],
        groups: Groups,
        ordinals: range,
        dropped: Mapping[int, str],
        gather: Gather,
        *,
        passed_over: Collection[TrajectoryGroup] = (),
        dropped_tokens: int = 0,
        rounds: int = 1,
        drawn: Drawn = NOTHING_DRAWN,
    ) -> RolloutBatch:
        """The batch that all drivers have made together. Collective.

        Args:
            made: by this driver, by position in the batch.
            ordinals: that the batch settles.
            gather: over all ranks; it may raise LeaveAgreed where the caller can still leave.
            passed_over: groups of this driver that the batch settles without training on them. Their lost answers
                count: a group may have no signal only because it lost all answers but one.
        """
        failures: Counter[str] = Counter()
        for group in (*made.values(), *passed_over):
            failures.update(group.failures)
        rewards = self._of_all_rewards(made.values(), gather) if self.config.grpo.baseline == "batch" else None
        trained_here = exchange(made, self.config, groups, self.stream.problem, gather, rewards)
        return RolloutBatch(
            groups=[*trained_here.values()],
            positions=[*trained_here],
            first_ordinal=ordinals.start,
            next_ordinal=ordinals.stop,
            dropped=dropped,
            dropped_tokens=dropped_tokens,
            failures=failures,
            rounds=rounds,
            drawn=drawn,
            rewards=rewards,
        )

    def _rewards(self, groups: Collection[TrajectoryGroup]) -> GroupRewards:
        return group_rewards([*groups], self.config.sampling.max_new_tokens, self.config.grpo.overlong)

    def _of_all_rewards(self, made: Collection[TrajectoryGroup], gather: Gather) -> RewardMoments:
        """Of the answers that any driver has made. Collective."""
        own = torch.tensor(RewardMoments.of(self._rewards(made).shaped), dtype=torch.float64)
        return RewardMoments.joined(RewardMoments(*part.tolist()) for part in gather(own))
