"""A rank's trajectories as what an update reads: tensors, and micro-batches that all ranks have equally many of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.agent.trajectories import Trajectory, TrajectoryGroup
from megatron_rl.algorithms.advantages import group_advantages
from megatron_rl.algorithms.loss import has_gradient
from megatron_rl.algorithms.overlong import trained_mask
from megatron_rl.algorithms.packing import MicroBatch, pack
from megatron_rl.algorithms.reduction import local_normaliser
from megatron_rl.algorithms.signal import group_rewards, has_signal
from megatron_rl.config import RunConfig
from megatron_rl.metrics.stats import BatchStats
from megatron_rl.rollout.driver import RolloutBatch


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """The rank's share of a step's batch. What is [trained tokens] is of the tokens in the loss masks of all
    trajectories, concatenated, and lies on the device; the rest is on the CPU."""

    trajectories: Sequence[Trajectory]
    group: Tensor
    """[trajectories] index among the rank's groups."""
    rewards: Tensor
    """[trajectories] as scored."""
    advantages: Tensor
    """[trajectories]"""
    signal: Tensor
    """[groups] whether there is something to learn from: see `has_signal`."""
    lengths: Tensor
    """[trajectories] trained tokens."""
    carries_loss: Tensor
    """[trajectories] 1, or 0 where it is masked as overlong."""
    has_gradient: Sequence[bool]
    """[trajectories] whether it goes through the model: see `has_gradient`."""
    trajectory_of_token: Tensor
    """[trained tokens]"""
    inference_logprobs: Tensor
    """[trained tokens] of the engine."""
    current: Tensor | None
    """[trained tokens] whether the weights that sampled it are those that are trained; None where all were."""


def training_batch(
    groups: Sequence[TrajectoryGroup], config: RunConfig, policy_version: int, device: torch.device
) -> TrainingBatch:
    """Advantages and trained tokens of these groups.

    policy_version: of the weights that are to be trained on them.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = group_rewards(groups, config.sampling.max_new_tokens, config.grpo.overlong)
    lengths = torch.tensor([sum(t.loss_mask) for t in trajectories], dtype=torch.long)
    trained = list(chain.from_iterable(t.loss_mask for t in trajectories))
    logprobs = list(compress(chain.from_iterable(t.logprobs for t in trajectories), trained))
    versions = list(compress(chain.from_iterable(t.versions for t in trajectories), trained))
    cut = torch.tensor([t.finish_reason == "length" for t in trajectories], dtype=torch.bool)
    divide = config.grpo.advantage_std
    advantages = group_advantages(rewards.shaped, rewards.group, len(groups), divide_by_std=divide)
    carries_loss = trained_mask(cut, config.grpo.overlong)
    return TrainingBatch(
        trajectories=trajectories,
        group=rewards.group,
        rewards=rewards.scored,
        advantages=advantages,
        signal=has_signal(rewards.shaped, rewards.group, len(groups)),
        lengths=lengths,
        carries_loss=carries_loss,
        has_gradient=has_gradient(advantages, carries_loss, config.grpo).tolist(),
        trajectory_of_token=torch.repeat_interleave(torch.arange(len(trajectories)), lengths).to(device),
        inference_logprobs=torch.tensor(logprobs, dtype=torch.float32, device=device),
        current=None
        if set(versions) <= {policy_version}
        else torch.tensor([version == policy_version for version in versions], device=device),
    )


def batch_stats(batch: TrainingBatch, rollouts: RolloutBatch, policy_version: int, packed_tokens: int) -> BatchStats:
    """What the trajectories look like, before training on them."""
    answer_lengths = [t.answer_length for t in batch.trajectories]
    staleness = [0]
    if batch.current is not None:
        staleness = [
            policy_version - min(compress(t.versions, t.loss_mask), default=policy_version) for t in batch.trajectories
        ]
    rewards = batch.rewards.double()
    return BatchStats(
        answers=len(batch.trajectories),
        groups=len(rollouts.groups),
        groups_with_signal=int(batch.signal.sum()),
        reward=float(rewards.sum()),
        reward_squared=float(rewards.square().sum()),
        answer_tokens=sum(answer_lengths),
        answer_length_max=max(answer_lengths, default=0),
        answer_length_min=min(answer_lengths, default=float("inf")),
        prompt_tokens=sum(t.prompt_length for t in batch.trajectories),
        packed_tokens=packed_tokens,
        unpacked_tokens=sum(
            t.prompt_length + t.answer_length for t in compress(batch.trajectories, batch.has_gradient)
        ),
        truncated=sum(t.finish_reason == "length" for t in batch.trajectories),
        failed=sum(rollouts.failures.values()),
        dropped=len(rollouts.dropped),
        staleness=sum(staleness),
        staleness_max=max(staleness),
    )


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """What of a batch goes into one optimizer step on this rank."""

    microbatches: Sequence[MicroBatch]
    normaliser: float
    """This rank's part, see `local_normaliser`: of all chosen trajectories, also those that are not packed."""

    @property
    def packed_tokens(self) -> int:
        return sum(len(micro.tokens) for micro in self.microbatches)


def update_batch(batch: TrainingBatch, chosen: Sequence[int], config: RunConfig) -> UpdateBatch:
    """The chosen trajectories, packed but for those without a gradient, which are in the mean as zeros."""
    tokens = [trajectory.tokens for trajectory in batch.trajectories]
    masks = [trajectory.loss_mask for trajectory in batch.trajectories]
    index = torch.tensor(chosen, dtype=torch.long)
    return UpdateBatch(
        pack(
            tokens, masks, (each for each in chosen if batch.has_gradient[each]), config.training.tokens_per_microbatch
        ),
        local_normaliser(batch.lengths[index], batch.carries_loss[index], config.grpo.reduction),
    )


def agreed(updates: Sequence[UpdateBatch], data: dist.ProcessGroup, device: torch.device) -> list[UpdateBatch]:
    """The same updates with the normaliser of the global batch, and with as many micro-batches on every rank: those
    that have fewer get empty ones. Collective over `data`, the ranks with the same part of the model."""
    mine = [[update.normaliser, float(len(update.microbatches))] for update in updates]
    table = torch.tensor(mine, dtype=torch.float64, device=device)
    of_ranks = [torch.empty_like(table) for _ in range(dist.get_world_size(data))]
    dist.all_gather(of_ranks, table, group=data)
    everyone = torch.stack(of_ranks).cpu()  # [ranks, updates, 2]
    normalisers, counts = everyone[..., 0].sum(0).tolist(), everyone[..., 1].amax(0).int().tolist()
    return [
        UpdateBatch([*update.microbatches, *[MicroBatch.empty()] * (count - len(update.microbatches))], normaliser)
        for update, normaliser, count in zip(updates, normalisers, counts, strict=True)
    ]
