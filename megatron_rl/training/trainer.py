"""One GRPO step on a batch of rollouts: advantages, log-probs, updates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.agent.trajectories import Trajectory, TrajectoryGroup
from megatron_rl.algorithms.advantages import group_advantages
from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.algorithms.logprobs import token_logprobs
from megatron_rl.algorithms.loss import GrpoInputs, GrpoStats, grpo_loss
from megatron_rl.algorithms.overlong import trained_mask
from megatron_rl.algorithms.packing import MicroBatch, microbatches
from megatron_rl.algorithms.reduction import local_normaliser, token_weights
from megatron_rl.algorithms.signal import group_rewards, has_signal
from megatron_rl.algorithms.updates import update_plan
from megatron_rl.config import RunConfig
from megatron_rl.metrics.tally import Tally
from megatron_rl.model.policy import Policy
from megatron_rl.platform.api import Platform
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.rank.world import Groups
from megatron_rl.rollout.driver import RolloutBatch
from megatron_rl.training.optimizer import PolicyOptimizer, Update


class GradientsNotFinite(RuntimeError):
    """Too many updates in a row had a non-finite gradient."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The rank's answers as tensors: [rollouts], and [answer tokens] where said."""

    trajectories: Sequence[Trajectory]
    group: Tensor
    """Index among the rank's groups."""
    rewards: Tensor
    lengths: Tensor
    trained: Tensor
    """1 where the answer carries loss, 0 where it is masked as overlong."""
    advantages: Tensor
    signal: Tensor
    """[groups] whether there is something to learn from: see `has_signal`."""
    rollout_of_token: Tensor
    """[answer tokens]"""
    targets: Tensor
    """[answer tokens] the tokens."""
    inference_logprobs: Tensor
    """[answer tokens] of the engine."""


class Trainer:
    """Owns the optimizer's progress; everything it counts goes into the checkpoint."""

    def __init__(
        self,
        policy: Policy,
        optimizer: PolicyOptimizer,
        reference: Policy | None,
        config: RunConfig,
        platform: Platform,
        groups: Groups,
        safe_points: SafePoints,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.reference = reference
        self.config = config
        self.platform = platform
        self.groups = groups
        self.safe_points = safe_points
        self.policy_version = 0
        self.nonfinite_in_a_row = 0
        self.between_steps = True
        """Whether weights and optimizer are those that a step began with or ended with."""

    def train(self, batch: RolloutBatch, step: int, tally: Tally) -> list[Update]:
        """All passes and updates over one batch; what happened goes into `tally`. Collective.

        Raises LeaveAgreed where a rank was asked to leave: before the first update with all as it was. After that the
        step is finished if there is time for it, else `between_steps` is false: nothing here can be saved.
        """
        grpo = self.config.grpo
        answers = self.answers(batch.groups)
        _describe(batch, answers, self.policy_version, tally)
        updates_per_pass = grpo.updates_per_pass
        on_policy = grpo.iterations * updates_per_pass == 1
        everything = self._pack(answers, range(len(answers.trajectories)))
        tally.add("packed_tokens", sum(len(micro.tokens) for micro in everything))
        with self.safe_points.phase("log-probs"):
            # With a single update the training pass itself is at the old weights: no second forward.
            old = None if on_policy else self.score(self.policy, answers, everything)
            reference = self.score(self.reference, answers, everything) if self.reference is not None else None
            self.platform.synchronize()

        updates: list[Update] = []
        total, began = grpo.iterations * updates_per_pass, time.monotonic()
        for pass_ in range(grpo.iterations):
            plan = update_plan(grpo.prompts_per_step, updates_per_pass, self.config.training.seed, step, pass_)
            update_of_group = [plan[position] for position in batch.positions]
            for index in range(updates_per_pass):
                chosen = [i for i, g in enumerate(answers.group.tolist()) if update_of_group[g] == index]
                packed = everything if updates_per_pass == 1 else self._pack(answers, chosen)
                mean_s = (time.monotonic() - began) / len(updates) if updates else 0.0
                unfinished_s = mean_s * (total - len(updates)) if updates else None
                with self.safe_points.phase("train"):
                    updates.append(self._update(answers, chosen, packed, old, reference, tally, unfinished_s))
                self.between_steps = len(updates) == total
        return updates

    def answers(self, groups: Sequence[TrajectoryGroup]) -> Answers:
        device = self.platform.device
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        lengths = torch.tensor([t.answer_length for t in trajectories], dtype=torch.long, device=device)
        cut = torch.tensor([t.finish_reason == "length" for t in trajectories], dtype=torch.bool, device=device)
        overlong = self.config.grpo.overlong
        rewards = group_rewards(groups, self.config.sampling.max_new_tokens, overlong)
        group, shaped = rewards.group.to(device), rewards.shaped.to(device)
        return Answers(
            trajectories=trajectories,
            group=group,
            rewards=rewards.scored.to(device),
            lengths=lengths,
            trained=trained_mask(cut, overlong),
            advantages=group_advantages(shaped, group, len(groups), divide_by_std=self.config.grpo.advantage_std),
            signal=has_signal(shaped, group, len(groups)),
            rollout_of_token=torch.repeat_interleave(torch.arange(len(trajectories), device=device), lengths),
            targets=torch.tensor(
                [x for t in trajectories for x in t.tokens[t.prompt_length :]], dtype=torch.long, device=device
            ),
            inference_logprobs=torch.tensor(
                [x for t in trajectories for x in t.logprobs[t.prompt_length :]], dtype=torch.float32, device=device
            ),
        )

    def _pack(self, answers: Answers, chosen: Sequence[int]) -> list[MicroBatch]:
        limit = self.config.training.tokens_per_microbatch
        return microbatches(answers.trajectories, chosen, limit, self.platform.device)

    @torch.no_grad()
    def score(self, policy: Policy, answers: Answers, packed: Sequence[MicroBatch]) -> Tensor:
        """[answer tokens] log-probs of all answers under `policy`, without gradient; not of all where this rank was
        asked to leave meanwhile."""
        scores = torch.zeros_like(answers.inference_logprobs)
        for micro in packed:
            if self.safe_points.poll():
                break
            logprobs, _ = self._logprobs(policy, answers, micro)
            scores[micro.answer_tokens] = logprobs
        return scores

    def _logprobs(self, policy: Any, answers: Answers, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        logits = policy(micro.tokens, micro.positions, micro.layout, micro.select)
        return token_logprobs(logits, answers.targets[micro.answer_tokens], self.config.sampling.temperature)

    def _update(
        self,
        answers: Answers,
        chosen: Sequence[int],
        packed: Sequence[MicroBatch],
        old: Tensor | None,
        reference: Tensor | None,
        tally: Tally,
        unfinished_s: float | None,
    ) -> Update:
        """unfinished_s: see SafePoints.agree."""
        grpo = self.config.grpo
        index = torch.tensor(chosen, dtype=torch.long, device=self.platform.device)
        normaliser = torch.tensor(
            [local_normaliser(answers.lengths[index], answers.trained[index], grpo.reduction)],
            dtype=torch.float64,
            device=self.platform.device,
        )
        dist.all_reduce(normaliser, group=self.groups.data)
        weights = token_weights(answers.lengths, answers.trained, grpo.reduction, normaliser.item())
        per_rollout = torch.stack((weights, answers.advantages))

        self.optimizer.zero_grad()
        for micro in packed:
            if self.safe_points.poll() and unfinished_s is None:
                break
            logprobs, entropy = self._logprobs(self.optimizer.ddp, answers, micro)
            of_token = per_rollout[:, answers.rollout_of_token[micro.answer_tokens]]
            inputs = GrpoInputs(
                logprobs=logprobs,
                old_logprobs=logprobs.detach() if old is None else old[micro.answer_tokens],
                advantages=of_token[1],
                weights=of_token[0],
                inference_logprobs=answers.inference_logprobs[micro.answer_tokens],
                ref_logprobs=None if reference is None else reference[micro.answer_tokens],
            )
            loss, stats = grpo_loss(inputs, grpo)
            loss.backward()
            tally.add("loss", loss.detach())
            tally.add("entropy", (entropy * (inputs.weights != 0)).sum())
            _tally_stats(stats, tally)
        if not packed:
            _tally_nothing(reference is not None, grpo, tally)
        self.safe_points.agree(unfinished_s)
        update = self.optimizer.update(self.policy_version)
        self._count(update)
        return update

    def _count(self, update: Update) -> None:
        if update.applied:
            self.policy_version += 1
            self.nonfinite_in_a_row = 0
            return
        self.nonfinite_in_a_row += 1
        if self.nonfinite_in_a_row >= self.config.optimizer.max_nonfinite_updates:
            raise GradientsNotFinite(
                f"{self.nonfinite_in_a_row} updates in a row had a non-finite gradient "
                f"(norm {update.grad_norm}); the newest checkpoint is from before them. Lower optimizer.learning_rate, "
                "or look at the rewards and log-probs of the last samples"
            )


def _tally_stats(stats: GrpoStats, tally: Tally) -> None:
    for name, value in stats.sums.items():
        tally.add(f"sum/{name}", value)
    for name, value in stats.maxima.items():
        tally.maximum(f"max/{name}", value)


def _tally_nothing(with_reference: bool, grpo: GrpoConfig, tally: Tally) -> None:
    """The same names as a rank that had something to train, so that the ranks' tallies line up."""
    none = torch.zeros(0)
    inputs = GrpoInputs(none, none, none, none, none, none if with_reference else None)
    tally.add("loss", 0.0)
    tally.add("entropy", 0.0)
    _tally_stats(grpo_loss(inputs, grpo)[1], tally)


def _describe(batch: RolloutBatch, answers: Answers, policy_version: int, tally: Tally) -> None:
    """Tally what the answers look like, before training on them."""
    trajectories, lengths = answers.trajectories, answers.lengths
    tally.add("answers", len(trajectories))
    tally.add("groups", len(batch.groups))
    tally.add("reward", answers.rewards.double().sum())
    tally.add("reward_squared", answers.rewards.double().square().sum())
    tally.add("signal", answers.signal.sum())
    tally.add("answer_tokens", lengths.sum())
    tally.add("prompt_tokens", sum(t.prompt_length for t in trajectories))
    tally.add("truncated", sum(t.finish_reason == "length" for t in trajectories))
    tally.add("failed", sum(sum(group.failures.values()) for group in batch.groups))
    staleness = [policy_version - t.oldest_version for t in trajectories]
    tally.add("staleness", sum(staleness))
    tally.maximum("staleness_max", max(staleness, default=0))
    tally.maximum("answer_length_max", max((t.answer_length for t in trajectories), default=0))
    tally.minimum("answer_length_min", min((t.answer_length for t in trajectories), default=float("inf")))
