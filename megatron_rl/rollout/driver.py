"""One rollout driver: this rank's share of every batch, from prompts of the stream to scored groups."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.agent.api import GroupedRolloutGenerator, GroupRolloutRequest
from megatron_rl.agent.keys import group_key
from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.algorithms.advantages import RewardMoments
from megatron_rl.algorithms.signal import GroupRewards, group_rewards, has_signal
from megatron_rl.config import RunConfig
from megatron_rl.inference.api import PromptTooLong, ResumableInference
from megatron_rl.metrics.names import NO_SIGNAL, PROMPT_TOO_LONG
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.rollout.bank.bank import Bank
from megatron_rl.rollout.bank.recording import Recording
from megatron_rl.rollout.exchange import exchange
from megatron_rl.rollout.generation import AgentLoop
from megatron_rl.rollout.stream import PromptStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """What one step trains on, as this rank sees it."""

    groups: list[TrajectoryGroup]
    """Those that its replica of the trained model trains on, whole, in ordinal order; the same on every rank of it."""
    positions: list[int]
    """Place of each of them in the global batch, 0, 1, 2, ... in ordinal order. Of a prompt that was too long, where
    nothing could take its place, it stays empty."""
    first_ordinal: int
    next_ordinal: int
    dropped: Mapping[int, str] = field(default_factory=dict)
    """Ordinals that this driver has settled without training, and why."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Answers of groups to train on that this driver has lost, by reason."""
    rounds: int = 1
    rewards: RewardMoments | None = None
    """Of all answers of the batch, where the baseline is made of them."""


class RolloutDriver:
    """Runs the agent on this rank's share of the prompts, or follows the rank that does for its engine replica; all
    agree on what the batch is."""

    def __init__(
        self,
        agent: GroupedRolloutGenerator,
        inference: ResumableInference,
        bank: Bank | None,
        config: RunConfig,
        groups: Groups,
        safe_points: SafePoints,
        loop: AgentLoop,
    ) -> None:
        """bank: None on a rank that follows."""
        self.agent = agent
        self.inference = inference
        self.bank = bank
        self.config = config
        self.stream = PromptStream(agent.training_problems(), config.training.seed)
        self.groups = groups
        self.safe_points = safe_points
        self.loop = loop
        self._answered = 0  # groups so far

    def collect(self, first_ordinal: int) -> RolloutBatch:
        """The batch of one step. Collective.

        Without dynamic sampling these are the next `prompts_per_step` ordinals. With it, the first that many in
        ordinal order whose rewards differ: every round draws just as many further ordinals as are missing, so
        nothing is drawn that this step does not settle. When the rounds are used up, the last groups without
        signal stand in: their advantages are 0. A prompt too long for the engine is dropped; without a further round
        the batch is smaller by it.

        Raises LeaveAgreed where a rank was asked to leave: nothing has changed.
        """
        wanted = self.config.grpo.prompts_per_step
        dynamic = self.config.grpo.dynamic_sampling
        rounds = dynamic.max_rounds if dynamic.enabled else 1
        kept: dict[int, TrajectoryGroup] = {}  # by position
        dropped: dict[int, str] = {}
        ordinal, filled, round_ = first_ordinal, 0, 0
        while filled < wanted and round_ < rounds:
            round_ += 1
            drawn = range(ordinal, ordinal + wanted - filled)
            share = self.loop.share(ordinal, len(drawn))
            groups = self._roll_out(share)
            self.safe_points.agree()
            last = round_ == rounds
            usable = groups if last else self._with_signal(groups)
            trained, answered = {group.ordinal for group in usable}, {group.ordinal for group in groups}
            dropped |= dict.fromkeys(answered - trained, NO_SIGNAL) | dict.fromkeys(
                {*share} - answered, PROMPT_TOO_LONG
            )
            placed = drawn if last else self._of_all_drivers(drawn, trained)
            position = {ordinal: filled + index for index, ordinal in enumerate(placed)}
            kept |= {position[group.ordinal]: group for group in usable}
            filled += len(placed)
            ordinal = drawn.stop
        failures: Counter[str] = Counter()
        for group in kept.values():
            failures.update(group.failures)
        with self.safe_points.phase("wait"):
            rewards = self._of_all_rewards(kept.values()) if self.config.grpo.baseline == "batch" else None
            trained_here = exchange(kept, self.config, self.groups, self.stream.problem, rewards)
        return RolloutBatch(
            groups=[*trained_here.values()],
            positions=[*trained_here],
            first_ordinal=first_ordinal,
            next_ordinal=ordinal,
            dropped=dropped,
            failures=failures,
            rounds=round_,
            rewards=rewards,
        )

    def begin_checkpoint(self, step: int, next_ordinal: int) -> None:
        """See `Bank.begin_checkpoint`."""
        if self.bank is not None:
            self.bank.begin_checkpoint(step, next_ordinal)

    def end_checkpoint(self, step: int) -> None:
        """See `Bank.end_checkpoint`."""
        if self.bank is not None:
            self.bank.end_checkpoint(step)

    def close(self) -> None:
        """Write what is banked, and end the loop."""
        if self.bank is not None:
            self.bank.close()
        self.loop.close()

    def _roll_out(self, ordinals: range) -> list[TrajectoryGroup]:
        """The groups of these ordinals, without those whose prompt is too long; none where this rank was asked to
        leave meanwhile, or follows."""
        with self.safe_points.phase("generate"):
            began, busy_s = time.perf_counter(), self.inference.busy_s
            groups = self.loop.run(lambda: self._answers(ordinals), lambda: (self.inference.busy_s, self._answered))
            idle_s = time.perf_counter() - began - (self.inference.busy_s - busy_s)
        self.safe_points.timeline.move("generate", "reward", idle_s)
        return sorted(groups or [], key=lambda group: group.ordinal)

    async def _answers(self, ordinals: Sequence[int]) -> list[TrajectoryGroup]:
        assert self.bank is not None, "a rank that follows has no agents"
        tasks: list[asyncio.Task[TrajectoryGroup | None]] = []
        try:
            async with self.bank.recording(self.inference, ordinals, self.stream.problem) as recording:
                missing = [ordinal for ordinal in ordinals if ordinal not in recording.groups]
                tasks += [asyncio.create_task(self._answer(ordinal, recording)) for ordinal in missing]
                # A driver that is cancelled cancels them only below, when what they have is recorded.
                gathered = asyncio.gather(*tasks)
                gathered.add_done_callback(_note_end)
                answered = await asyncio.shield(gathered)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [*recording.groups.values(), *(group for group in answered if group is not None)]

    async def _answer(self, ordinal: int, recording: Recording) -> TrajectoryGroup | None:
        """The group of an ordinal; None where its prompt is too long."""
        request = GroupRolloutRequest(
            ordinal=ordinal,
            problem=self.stream.problem(ordinal),
            group_size=self.config.grpo.group_size,
            sampling=self.config.sampling,
            key=group_key(self.config.training.seed, ordinal, 0, recording.policy_version(ordinal)),
            inference=recording,
            reward_timeout_s=self.config.environment.reward_timeout_s,
        )
        try:
            group = await self.agent.group_rollout(request)
        except PromptTooLong as error:
            logger.warning("prompt %d is dropped: %s", ordinal, error)
            return None
        self._answered += 1
        recording.add(group)
        return group

    def _rewards(self, groups: Collection[TrajectoryGroup]) -> GroupRewards:
        return group_rewards([*groups], self.config.sampling.max_new_tokens, self.config.grpo.overlong)

    def _of_all_rewards(self, groups: Collection[TrajectoryGroup]) -> RewardMoments:
        """Of the answers that any driver has made. Collective."""
        own = torch.tensor(RewardMoments.of(self._rewards(groups).shaped), dtype=torch.float64)
        of_all = [torch.empty_like(own) for _ in range(self.groups.control.size())]
        dist.all_gather(of_all, own, group=self.groups.control)
        return RewardMoments.joined(RewardMoments(*part.tolist()) for part in of_all)

    def _with_signal(self, groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        rewards = self._rewards(groups)
        return [*compress(groups, has_signal(rewards.shaped, rewards.group, len(groups)).tolist())]

    def _of_all_drivers(self, drawn: range, trained: set[int]) -> list[int]:
        """What any driver trains on of the ordinals that were drawn. Collective."""
        anywhere = torch.tensor([ordinal in trained for ordinal in drawn], dtype=torch.int32)
        dist.all_reduce(anywhere, group=self.groups.control)
        return [*compress(drawn, anywhere.tolist())]


def _note_end(gathered: asyncio.Future[Any]) -> None:
    """Have asyncio not complain that nobody looks at work that was given up."""
    if not gathered.cancelled():
        gathered.exception()
