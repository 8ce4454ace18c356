"""One step on a batch of rollouts, or of rows of data: advantages, log-probs, updates."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.importance import answer_log_ratios
from megatron_rl.algorithms.logprobs import predicted_logprobs
from megatron_rl.algorithms.loss import grpo_loss, supervised_loss, teacher_advantages
from megatron_rl.algorithms.own_baseline import own_baseline
from megatron_rl.algorithms.own_policy_loss import own_policy_loss
from megatron_rl.algorithms.reduction import token_weights
from megatron_rl.algorithms.trained_tokens import TrainedTokens
from megatron_rl.algorithms.updates import update_plan
from megatron_rl.config import RunConfig
from megatron_rl.distill.served import ServedTeacher
from megatron_rl.metrics.stats import (
    BatchStats,
    DeviceStats,
    EnvironmentStats,
    LossStats,
    StepStats,
    UpdateStats,
    combined,
    uncounted,
)
from megatron_rl.model.flops import training_flops
from megatron_rl.model.policy import Policy
from megatron_rl.platform.api import Platform
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.rollout.batch import RolloutBatch
from megatron_rl.rollout.record import RolloutRecord
from megatron_rl.training.batch import (
    TrainingBatch,
    UpdateBatch,
    agree,
    batch_stats,
    environment_stats,
    training_batch,
    update_batch,
    update_part,
)
from megatron_rl.training.optimizer import PolicyOptimizer, Update
from megatron_rl.training.pipeline import Pipeline
from megatron_rl.training.schedule import ModelInput, UpdateInput, forward, forward_backward
from megatron_rl.training.scores import Scores


class GradientsNotFinite(RuntimeError):
    """Too many updates in a row had a non-finite gradient."""


class Trainer:
    """Runs steps and counts updates. The counters go into the checkpoint."""

    def __init__(
        self,
        policy: Policy,
        optimizer: PolicyOptimizer,
        reference: Policy | None,
        config: RunConfig,
        platform: Platform,
        groups: Groups,
        safe_points: SafePoints,
        policy_version: int = 0,
        nonfinite_in_a_row: int = 0,
        teacher: Policy | ServedTeacher | None = None,
    ) -> None:
        """
        Args:
            reference: initial policy for the KL penalty, if there is one. It may be `policy`, which without its
                adapters is the initial one.
            teacher: of on-policy distillation, if there is one.

        Raises ConfigurationError for an unusable policy loss of the user's.
        """
        self.policy = policy
        self.optimizer = optimizer
        self.reference = reference
        self.teacher = teacher
        self.config = config
        self.platform = platform
        self.groups = groups
        self.safe_points = safe_points
        self.policy_version = policy_version
        self.nonfinite_in_a_row = nonfinite_in_a_row
        self.between_steps = True
        """False only within a step, when weights and optimizer are between two of its updates."""
        self._pipeline = Pipeline(groups)
        own_policy_loss(config.grpo)  # an unusable one is refused before the first step
        own_baseline(config.grpo)

    def train(
        self,
        rollouts: RolloutBatch,
        step: int,
        weights_change: Callable[[], None] = lambda: None,
        record: RolloutRecord | None = None,
    ) -> StepStats:
        """Run all passes and updates over one batch. Return what this rank counted: on the ranks of a replica, which
        all need its batch, only the one that `Groups.reports` counts. Collective.

        weights_change: called on all ranks before each update. It may block; an exception ends the step.
        record: receives the groups, once they are trained on.

        Raises LeaveAgreed if a rank was asked to leave: before the first update with everything unchanged. Later the
        step is finished if there is time, otherwise `between_steps` is false and nothing can be saved.
        """
        grpo = self.config.grpo
        batch = training_batch(
            rollouts.groups, self.config, self.policy_version, self.platform.device, rollouts.advantages
        )
        chosen = self._chosen(batch, rollouts.positions, step)
        parts = [update_part(batch, each, self.config, self.platform) for each in chosen]
        with self.safe_points.phase("wait"):
            agreed = agree(parts, self.groups)
        mine = [update_batch(part, of_all) for part, of_all in zip(parts, agreed, strict=True)]
        packed_tokens = sum(update.packed_tokens for update in mine[: grpo.updates_per_pass])
        seen = batch_stats(batch, rollouts, self.policy_version, packed_tokens)
        if not self.groups.reports:  # each driver counts its own lost and dropped answers
            own = {name: getattr(seen, name) for name in ("failed", "dropped", "overdue_tokens")}
            seen = replace(uncounted(BatchStats), **own)
        ids = self.config.environment_ids
        environments = dict.fromkeys(ids, uncounted(EnvironmentStats))
        if self.groups.reports:
            environments = environment_stats(batch, rollouts.groups, ids)
        inputs = [self._input(batch, update) for update in mine]
        first_pass = [each for update in inputs[: grpo.updates_per_pass] for each in update.inputs]
        planned = inputs * grpo.iterations if grpo.updates_per_pass == 1 else inputs
        records = record is not None and record.is_sampled(step)
        with self.safe_points.phase("log-probs"):
            scores = self._scores(batch, mine[: grpo.updates_per_pass], first_pass, records=records)
            self.platform.synchronize()

        losses: list[LossStats] = []
        updates: list[Update] = []
        began = time.monotonic()
        for update in planned:
            mean_s = (time.monotonic() - began) / len(updates) if updates else 0.0
            unfinished_s = mean_s * (len(planned) - len(updates)) if updates else None
            with self.safe_points.phase("train"):
                updates.append(self._update(batch, update, scores, losses, unfinished_s, weights_change))
            self.between_steps = len(updates) == len(planned)
        self.optimizer.overlap.finish_gathering()
        device = self._device_stats(mine if self.groups.reports else [], len(planned))
        loss = self._loss_stats(losses) if any(update.inputs for update in planned) else None
        if record is not None:
            if scores.recorded is not None and self.groups.context.size() > 1:
                dist.all_reduce(scores.recorded, group=self.groups.context)
            logprobs = scores.before if scores.recorded is None else scores.recorded
            record.add(step, rollouts, self.groups.reports, batch.advantages, logprobs if records else None)
        return StepStats(seen, loss, _update_stats(updates, self.optimizer.host_bytes), device, environments)

    def _chosen(self, batch: TrainingBatch, positions: Sequence[int], step: int) -> list[list[int]]:
        """Sequences of each update of the step; of a single update if all are the same.

        positions: of the rank's groups in the global batch.
        """
        grpo = self.config.grpo
        if grpo.updates_per_pass == 1:
            return [list(range(len(batch.sequences)))]
        chosen = []
        for pass_ in range(grpo.iterations):
            plan = update_plan(grpo.prompts_per_step, grpo.updates_per_pass, self.config.training.seed, step, pass_)
            update_of = [plan[positions[group]] for group in batch.group[batch.trajectory].tolist()]
            for update in range(grpo.updates_per_pass):
                chosen.append([index for index, its in enumerate(update_of) if its == update])
        return chosen

    def _input(self, batch: TrainingBatch, update: UpdateBatch) -> UpdateInput:
        grpo = self.config.grpo
        constant = grpo.reduction_length or self.config.sampling.max_new_tokens
        weights = token_weights(batch.lengths, batch.weights, grpo.reduction, update.normaliser, constant)
        per_sequence = torch.stack((weights, batch.advantages[batch.trajectory])).to(self.platform.device)
        inputs = [ModelInput.of(self.policy, micro, self.groups.context) for micro in update.microbatches]
        return UpdateInput(inputs, per_sequence)

    def _scores(
        self,
        batch: TrainingBatch,
        updates: Sequence[UpdateBatch],
        first_pass: Sequence[ModelInput],
        *,
        records: bool,
    ) -> Scores:
        """Score the batch before its first update. Collective, as `score` is.

        Args:
            updates, first_pass: updates of the first pass over the batch, and the inputs of their micro-batches.
            records: whether the log-probs are recorded.
        """
        before, answers, answer_tokens, reference = None, None, None, None
        if self.config.scores_first:
            before = self.score(self.policy, batch, first_pass)
            if self.config.grpo.compares_answers:
                ratios = before - batch.inference_logprobs
                answers, answer_tokens = answer_log_ratios(ratios, batch.trajectory_lengths)
        if self.reference is not None:
            with self.reference.without_adapters():
                reference = self.score(self.reference, batch, first_pass)
        teacher = self._teacher_logprobs(batch, updates)
        recorded = torch.zeros_like(batch.inference_logprobs) if records and before is None else None
        return Scores(before, answers, answer_tokens, reference, teacher, recorded)

    def score(self, policy: Policy, batch: TrainingBatch, inputs: Sequence[ModelInput]) -> Tensor:
        """[trained tokens] log-probs under `policy`, without gradient: 0 for tokens outside `inputs`, for the rest of
        the pass if this rank is asked to leave, and for all unless it is the last pipeline stage. Collective over the
        context-parallel ranks: one rank may predict in this pass what another trains on in an update."""
        scores = torch.zeros_like(batch.inference_logprobs)
        output = policy.output() if self._pipeline.last else None

        def receive(hidden: Tensor, read: ModelInput) -> None:
            assert output is not None
            scores[read.trained], _ = predicted_logprobs(
                hidden, output, read.targets, self.config.loss_temperature, entropy="none"
            )

        forward(policy, inputs, receive, self._pipeline, stop=self._leaves)
        if self.groups.context.size() > 1:
            dist.all_reduce(scores, group=self.groups.context)
        return scores

    def _teacher_logprobs(self, batch: TrainingBatch, updates: Sequence[UpdateBatch]) -> Tensor | None:
        """[trained tokens] log-probs of the teacher, as `score` returns them; None without a teacher."""
        if self.teacher is None:
            return None
        if isinstance(self.teacher, ServedTeacher):
            return self.teacher.logprobs(batch.sequences, self.platform.device)
        micros = [micro for update in updates for micro in update.microbatches]
        inputs = [ModelInput.of(self.teacher, micro, self.groups.context) for micro in micros]
        return self.score(self.teacher, batch, inputs)

    def _leaves(self) -> bool:
        """Record progress, and return whether this rank was asked to leave and may do so within a pass."""
        return self.safe_points.poll() and not self.groups.in_step

    def _update(
        self,
        batch: TrainingBatch,
        update: UpdateInput,
        scores: Scores,
        losses: list[LossStats],
        unfinished_s: float | None,
        weights_change: Callable[[], None],
    ) -> Update:
        """Take one optimizer step and append the statistics of its losses to `losses`.

        Args:
            unfinished_s: see SafePoints.agree.
            weights_change: see `train`.
        """
        output = self.policy.output() if self._pipeline.last else None

        def loss(hidden: Tensor, read: ModelInput) -> Tensor:
            assert output is not None
            logprobs, entropy = predicted_logprobs(
                hidden,
                output,
                read.targets,
                self.config.loss_temperature,
                entropy="gradient" if self.config.grpo.entropy_coefficient > 0 else "value",
            )
            assert entropy is not None
            index = read.trained
            scored = scores.at(index)
            sequence = batch.sequence_of_token[index]
            weights, advantages = update.per_sequence[:, sequence]
            inference = batch.inference_logprobs[index]
            old = logprobs.detach() if scored.before is None else scored.before
            if scores.recorded is not None:
                scores.recorded[index] = logprobs.detach()
            if batch.current is not None and not self.config.grpo.corrects:
                # Log-probs of older weights are known from the engine alone.
                old = torch.where(batch.current[index], old, inference)
            taught = None
            if scored.teacher is not None and self.config.distill is not None:
                taught = teacher_advantages(scored.teacher, old)
                advantages = advantages + self.config.distill.weight * taught
            tokens = TrainedTokens(
                logprobs=logprobs,
                old_logprobs=old,
                inference_logprobs=inference,
                entropy=entropy,
                advantages=advantages,
                weights=weights,
                ref_logprobs=scored.reference,
                answer_log_ratios=scored.answers,
                answer_tokens=scored.answer_tokens,
                sequence=sequence,
                sequences=len(batch.sequences),
                context=self.groups.context,
            )
            value, stats = supervised_loss(tokens) if self.config.supervised else grpo_loss(tokens, self.config.grpo)
            if taught is not None:
                stats = replace(stats, teacher_kl=-taught.masked_fill(weights == 0, 0.0).sum())
            losses.append(stats)
            return value

        self.optimizer.zero_grad()
        first = unfinished_s is None  # later updates always finish: a half-done step cannot be saved
        replica = self.groups.data.rank(), self.groups.context.rank()
        with self.policy.dropout(self.config.training.seed, self.policy_version, *replica):
            forward_backward(
                self.policy,
                update.inputs,
                loss,
                self._pipeline,
                stop=lambda: self._leaves() and first and not self.optimizer.overlap.reduces,
                partial_sums=self.optimizer.overlap.partial,
            )
        self.platform.synchronize()  # a slow device must delay its own rank here, not all ranks within the update
        weights_change()
        self.safe_points.agree(unfinished_s)
        with self.safe_points.phase("offload"):
            self.optimizer.reload()
        done = self.optimizer.update(self.policy_version)
        with self.safe_points.phase("offload"):
            self.optimizer.offload()
        self._count(done)
        return done

    def _loss_stats(self, losses: Sequence[LossStats]) -> LossStats:
        if self.groups.reports_losses:
            return combined(losses)
        grpo = self.config.grpo
        absent = {
            "clip_low": self.config.supervised or not grpo.is_bounded,
            "clip_high": self.config.supervised or not grpo.is_bounded,
            "kl": grpo.kl_beta == 0,
            "importance_weight": grpo.importance is None,
            "rejected": grpo.rejection is None,
            "teacher_kl": self.teacher is None,
        }
        return uncounted(LossStats, *(name for name, is_absent in absent.items() if is_absent))

    def _device_stats(self, mine: Sequence[UpdateBatch], updates: int) -> DeviceStats | None:
        """Return the device use of this step.

        mine: parts of the batch that this rank counts; `updates` may repeat them.
        """
        used = self.platform.device_use()
        if used is None:
            return None
        model = self.config.model
        peak = self.platform.peak_flops(model.dtype) or 0.0
        of_each = (
            training_flops(
                model,
                self.policy.vocab_size,
                tokens=len(micro.tokens),
                pairs=len(micro.tokens) + int(micro.positions.sum()),
                predictions=len(micro.targets),
            )
            for update in mine
            for micro in update.microbatches
        )
        return DeviceStats(
            peak_memory=used.peak_memory,
            power=used.power or 0.0,
            powers=used.power is not None,
            flops=sum(of_each) * updates / len(mine) if peak and mine else 0.0,
            peak_flops=peak,
        )

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


def _update_stats(updates: Sequence[Update], offloaded: int) -> UpdateStats:
    applied = [update for update in updates if update.applied]
    return UpdateStats(
        updates=len(updates),
        applied=len(applied),
        grad_norm=sum(update.grad_norm for update in applied),
        learning_rate=updates[-1].learning_rate,
        offloaded=offloaded,
    )
