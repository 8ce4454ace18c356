"""One rollout driver: this rank's share of every batch, from prompts of the stream to scored groups."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_rl.agent.api import GroupedRolloutGenerator, GroupRolloutRequest
from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.algorithms.signal import group_rewards, has_signal
from megatron_rl.config import RunConfig
from megatron_rl.inference.engine import Engine
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.rank.world import Groups
from megatron_rl.rollout.bank.memory import Memory, NoBank
from megatron_rl.rollout.stream import PromptStream, group_key, shares


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """What one step trains on, as this driver sees it."""

    groups: list[TrajectoryGroup]
    """This driver's groups, whole, in ordinal order."""
    positions: list[int]
    """Place of each of them in the global batch, 0..prompts_per_step-1 in ordinal order."""
    first_ordinal: int
    next_ordinal: int
    dropped: Mapping[int, str] = field(default_factory=dict)
    """Ordinals of the whole batch settled without training, and why."""
    rounds: int = 1

    @property
    def failures(self) -> Mapping[str, int]:
        """Answers of this driver's groups that were lost, by reason."""
        total: Counter[str] = Counter()
        for group in self.groups:
            total.update(group.failures)
        return total


class RolloutDriver:
    """Runs the agent on this rank's share of the prompts; all drivers agree on what the batch is."""

    def __init__(
        self,
        agent: GroupedRolloutGenerator,
        engine: Engine,
        config: RunConfig,
        groups: Groups,
        safe_points: SafePoints,
    ) -> None:
        self.agent = agent
        self.engine = engine
        self.bank: Memory = NoBank(engine)
        self.config = config
        self.stream = PromptStream(agent.training_problems(), config.training.seed)
        self.groups = groups
        self.safe_points = safe_points
        self._answered = 0  # groups so far

    def collect(self, first_ordinal: int) -> RolloutBatch:
        """The batch of one step. Collective.

        Without dynamic sampling these are the next `prompts_per_step` ordinals. With it, the first that many in
        ordinal order whose rewards differ: every round draws just as many further ordinals as are missing, so
        nothing is drawn that this step does not settle. When the rounds are used up, the last groups without
        signal stand in: their advantages are 0.

        Raises LeaveAgreed, with nothing changed, where a rank was asked to leave.
        """
        wanted = self.config.grpo.prompts_per_step
        dynamic = self.config.grpo.dynamic_sampling
        kept: list[TrajectoryGroup] = []
        positions: list[int] = []
        dropped: dict[int, str] = {}
        ordinal, filled, rounds = first_ordinal, 0, 0
        while filled < wanted:
            rounds += 1
            missing = wanted - filled
            share = shares(ordinal, missing, dist.get_world_size(self.groups.data))[dist.get_rank(self.groups.data)]
            groups = self._roll_out(share)
            self.safe_points.agree()
            last_round = not dynamic.enabled or rounds == dynamic.max_rounds
            keep = [True] * missing if last_round else self._with_signal(ordinal, missing, groups)
            place = {}
            for offset in range(missing):
                if keep[offset]:
                    place[ordinal + offset] = filled
                    filled += 1
                else:
                    dropped[ordinal + offset] = "no signal"
            kept.extend(group for group in groups if group.ordinal in place)
            positions.extend(place[group.ordinal] for group in groups if group.ordinal in place)
            ordinal += missing
        return RolloutBatch(kept, positions, first_ordinal, ordinal, dropped, rounds)

    def _roll_out(self, ordinals: range) -> list[TrajectoryGroup]:
        """The groups of these ordinals; none where this rank was asked to leave meanwhile."""
        with self.safe_points.phase("generate"):
            known = self.bank.groups(ordinals, self.stream.problem)
            began, busy_s = time.perf_counter(), self.engine.busy_s
            work = self._answers([ordinal for ordinal in ordinals if ordinal not in known])
            answered = asyncio.run(self.safe_points.run_until_asked(work, lambda: (self.engine.busy_s, self._answered)))
            idle_s = time.perf_counter() - began - (self.engine.busy_s - busy_s)
        self.safe_points.timeline.move("generate", "reward", idle_s)
        return [] if answered is None else sorted([*known.values(), *answered], key=lambda group: group.ordinal)

    async def _answers(self, ordinals: list[int]) -> list[TrajectoryGroup]:
        async with self.bank.keeping():
            return await asyncio.gather(*map(self._answer, ordinals))

    async def _answer(self, ordinal: int) -> TrajectoryGroup:
        group = await self.agent.group_rollout(self._request(ordinal))
        self._answered += 1
        self.bank.put(group)
        return group

    def _request(self, ordinal: int) -> GroupRolloutRequest:
        return GroupRolloutRequest(
            ordinal=ordinal,
            problem=self.stream.problem(ordinal),
            group_size=self.config.grpo.group_size,
            sampling=self.config.sampling,
            key=group_key(self.config.training.seed, ordinal, 0, self.bank.version(ordinal)),
            inference=self.bank.inference(ordinal),
        )

    def _with_signal(self, first: int, count: int, groups: list[TrajectoryGroup]) -> list[bool]:
        """For each of the round's ordinals, whoever drew it: is there something to learn from it?"""
        flags = torch.zeros(count, dtype=torch.int32)
        if groups:
            rewards = group_rewards(groups, self.config.sampling.max_new_tokens, self.config.grpo.overlong)
            place = torch.tensor([group.ordinal - first for group in groups])
            flags[place] = has_signal(rewards.shaped, rewards.group, len(groups)).int()
        dist.all_reduce(flags, group=self.groups.control)
        return flags.bool().tolist()
