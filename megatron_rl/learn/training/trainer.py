"""One step on a batch of rollouts, or of rows of data: advantages, log-probs, updates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.balance import update_plan
from megatron_rl.algorithms.credit import Credit
from megatron_rl.algorithms.logprobs import predicted_logprobs
from megatron_rl.algorithms.packing import MicroBatch
from megatron_rl.algorithms.reduction import token_weights
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.learn.rollout.record import RolloutRecord
from megatron_rl.learn.training.ahead import loss_ahead
from megatron_rl.learn.training.objective import FirstPass, Heard, Objective, Scores, trained_tokens
from megatron_rl.learn.training.optimizer import PolicyOptimizer, Update
from megatron_rl.learn.training.router_replays import RouterReplays
from megatron_rl.learn.training.schedule import ModelInput, Pipeline, UpdateInput, forward, forward_backward
from megatron_rl.learn.training.training_batch import (
    TrainingBatch,
    UpdateBatch,
    agree,
    batch_stats,
    environment_stats,
    training_batch,
    update_batch,
    update_part,
    with_losses,
)
from megatron_rl.model.grammar import Grammars
from megatron_rl.model.policy import Policy
from megatron_rl.rank.here import Here
from megatron_rl.rank.metrics.stats import (
    OF_LOSS,
    BatchStats,
    DeviceStats,
    EnvironmentStats,
    LossStats,
    StepStats,
    UpdateStats,
    combined,
    uncounted,
)
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.flops import training_flops


class GradientsNotFinite(RuntimeError):
    """Too many updates in a row had a non-finite gradient."""


class Trainer:
    """Runs steps and counts updates. The counters go into the checkpoint."""

    def __init__(
        self,
        policy: Policy,
        optimizer: PolicyOptimizer,
        objective: Objective,
        config: RunConfig,
        here: Here,
        policy_version: int = 0,
        nonfinite_in_a_row: int = 0,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.objective = objective
        self.config = config
        self.platform, self.groups, self.safe_points = here.platform, here.groups, here.safe_points
        self.policy_version = policy_version
        self.nonfinite_in_a_row = nonfinite_in_a_row
        self.between_steps = True  # false only within a step, when weights and optimizer are between two of its updates
        self._pipeline = Pipeline(here.groups)
        self.grammars: Grammars | None = None
        """Grammars over the tokenizer's tokens, for answers that were forced into one."""

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
        credit = self.objective.credit(rollouts.groups, rollouts.advantages)
        batch = self._batch(rollouts, credit)
        chosen = self._chosen(batch, rollouts.positions, step)
        parts = [update_part(batch, each, self.config, self.platform.kernels) for each in chosen]
        with self.safe_points.phase("wait"):
            agreed = agree(parts, self.groups)
        mine = [update_batch(part, of_all) for part, of_all in zip(parts, agreed, strict=True)]
        packed_tokens = sum(update.packed_tokens for update in mine[: grpo.updates_per_pass])
        seen, environments = self._seen(batch, rollouts, packed_tokens)
        replays = self.replays()
        inputs = [self._input(batch, update, replays) for update in mine]
        planned = inputs * grpo.iterations if grpo.updates_per_pass == 1 else inputs
        records = record is not None and record.is_sampled(step)
        with self.safe_points.phase("log-probs"):
            scores = self._scores(batch, mine[: grpo.updates_per_pass], inputs[: grpo.updates_per_pass])
            if records and scores.before is None:
                scores = replace(scores, recorded=torch.zeros_like(batch.inference_logprobs))
            self.platform.synchronize()

        # Half a step can be neither saved nor repeated. Before the first update a request to leave is granted at once;
        # later only if the rest of the step would miss the deadline. Example: updates take 20 s, and the request comes
        # in the second of four with 50 s left. Three updates take 60 s, so the ranks leave, and repeat the step.
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
        loss, environments = self._loss_stats(losses, environments, trained=any(each.inputs for each in planned))
        if record is not None:
            if scores.recorded is not None and self.groups.context.size() > 1:
                dist.all_reduce(scores.recorded, group=self.groups.context)
            logprobs = scores.before if scores.recorded is None else scores.recorded
            record.add(step, rollouts, batch.credit if self.groups.reports else None, logprobs if records else None)
        update_stats = _update_stats(updates, self.optimizer.host_bytes)
        missing = sum(update.missing_choices for update in mine[: grpo.updates_per_pass])
        router = None if replays is None else replays.stats(missing if self.groups.reports else 0)
        return StepStats(seen, loss, update_stats, device, environments, router)

    def _batch(self, rollouts: RolloutBatch, credit: Credit) -> TrainingBatch:
        device, version = self.platform.device, self.policy_version
        return training_batch(rollouts.groups, credit, self.config, version, device, self.grammars)

    def _seen(
        self, batch: TrainingBatch, rollouts: RolloutBatch, packed_tokens: int
    ) -> tuple[BatchStats, Mapping[str, EnvironmentStats]]:
        seen, ids = batch_stats(batch, rollouts, self.policy_version, packed_tokens), self.config.environment_ids
        if self.groups.reports:
            return seen, environment_stats(batch, rollouts.groups, ids)
        # Each driver counts its own lost and dropped answers.
        own = {name: getattr(seen, name) for name in ("failed", "dropped", "overdue_tokens")}
        return replace(uncounted(BatchStats), **own), dict.fromkeys(ids, uncounted(EnvironmentStats, *OF_LOSS))

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
            update_of = [plan[positions[group]] for group in batch.credit.group[batch.trajectory].tolist()]
            for update in range(grpo.updates_per_pass):
                chosen.append([index for index, its in enumerate(update_of) if its == update])
        return chosen

    def replays(self) -> RouterReplays | None:
        """Return the replays of a new step; None if the routers choose the experts."""
        model = self.config.model
        return None if model.router_replay == "off" else RouterReplays(self.policy, model)

    def _input(self, batch: TrainingBatch, update: UpdateBatch, replays: RouterReplays | None) -> UpdateInput:
        grpo = self.config.grpo
        constant = grpo.reduction_length or self.config.sampling.max_new_tokens
        weights = token_weights(batch.lengths, batch.weights, grpo.reduction, update.normaliser, constant)
        per_sequence = torch.stack((weights, batch.credit.advantages[batch.trajectory])).to(self.platform.device)
        inputs = [ModelInput.of(self.policy, micro, self.groups.context, replays) for micro in update.microbatches]
        return UpdateInput(inputs, per_sequence)

    def _scores(self, batch: TrainingBatch, updates: Sequence[UpdateBatch], inputs: Sequence[UpdateInput]) -> Scores:
        """Score the batch before its first update. Collective.

        updates, inputs: of the first pass over the batch.
        """
        microbatches = [micro for update in updates for micro in update.microbatches]
        read = [each for update in inputs for each in update.inputs]
        return self.objective.scores(
            FirstPass(batch, microbatches, read, self.groups.context, self.score, self._packed)
        )

    def _packed(self, batch: TrainingBatch, chosen: Sequence[int]) -> Sequence[MicroBatch]:
        """Pack sequences as for an update. Collective over all ranks."""
        part = update_part(batch, chosen, self.config, self.platform.kernels)
        with self.safe_points.phase("wait"):
            [agreed] = agree([part], self.groups)
        return update_batch(part, agreed).microbatches

    def score(
        self, policy: Policy, batch: TrainingBatch, inputs: Sequence[ModelInput], heard: Heard | None = None
    ) -> Tensor:
        """[trained tokens] log-probs under `policy`, without gradient: 0 for tokens outside `inputs`, for the rest of
        the pass if this rank is asked to leave, and for all unless it is the last pipeline stage. Collective over the
        context-parallel ranks: one rank may predict in this pass what another trains on in an update.

        heard: receives what the output layer reads, too.
        """
        scores = torch.zeros_like(batch.inference_logprobs)
        output = policy.output() if self._pipeline.last else None

        def receive(hidden: Tensor, read: ModelInput) -> None:
            assert output is not None
            scores[read.trained], _ = predicted_logprobs(
                hidden,
                output,
                read.targets,
                self.objective.temperature,
                entropy="none",
                allowed=batch.allowed_at(read.trained),
            )
            if heard is not None:
                heard(hidden, read)

        forward(policy, inputs, receive, self._pipeline, stop=self._leaves)
        if self.groups.context.size() > 1:
            dist.all_reduce(scores, group=self.groups.context)
        return scores

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
        loss = self._loss(batch, update, scores, losses)
        ahead = loss_ahead(self.policy, lambda of: update.per_sequence[0, batch.sequence_of_token[of]], losses)
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
                loss_ahead=ahead,
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

    def _loss(
        self, batch: TrainingBatch, update: UpdateInput, scores: Scores, losses: list[LossStats]
    ) -> Callable[[Tensor, ModelInput], Tensor]:
        """Return the loss of a micro-batch as `forward_backward` calls it. It appends its statistics to `losses`."""
        output = self.policy.output() if self._pipeline.last else None

        def loss(hidden: Tensor, read: ModelInput) -> Tensor:
            assert output is not None
            objective, index = self.objective, read.trained
            allowed = batch.allowed_at(index)
            logprobs, entropy = predicted_logprobs(
                hidden,
                output,
                read.targets,
                objective.temperature,
                entropy=objective.entropy,
                allowed=allowed,
            )
            assert entropy is not None
            if scores.recorded is not None:
                scores.recorded[index] = logprobs.detach()
            scored, context = scores.at(index), self.groups.context
            ids = self.config.environment_ids
            tokens = trained_tokens(batch, index, update.per_sequence, scored, logprobs, entropy, context, len(ids))
            tokens = replace(tokens, divergences=objective.divergences(hidden, output, scored, allowed))
            value, stats = objective.loss(tokens, scored)
            losses.append(stats)
            return value

        return loss

    def _loss_stats(
        self, losses: Sequence[LossStats], environments: Mapping[str, EnvironmentStats], *, trained: bool
    ) -> tuple[LossStats | None, Mapping[str, EnvironmentStats]]:
        """Return the statistics of all losses, and those of the environments with their parts of them.

        trained: whether some rank had something to train on.
        """
        if not trained:
            return None, environments
        absent = (*self.objective.absent, *(() if self.config.model.trains_prediction else ("prediction", "predicted")))
        whole = combined(losses) if self.groups.reports_losses else uncounted(LossStats, *absent)
        return replace(whole, by_environment=None), with_losses(environments, whole, self.config)

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
