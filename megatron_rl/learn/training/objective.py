"""The objective of a run: the credit of the answers in a batch, what a step reads from the batch before its updates,
the loss of an update, and which of the loss's statistics exist. The trainer does not distinguish between objectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.agent.trajectories import Branch, TrajectoryGroup
from megatron_rl.algorithms.allowed_tokens import AllowedTokens
from megatron_rl.algorithms.credit import Credit, assign_credit, credit_of_rows
from megatron_rl.algorithms.divergences import Distributions, JudgedTokens
from megatron_rl.algorithms.loss import TaughtTokens, distillation_loss, grpo_loss, measured_kl, supervised_loss
from megatron_rl.algorithms.loss_terms import answer_log_ratios
from megatron_rl.algorithms.own_functions import own_baseline, own_policy_loss
from megatron_rl.algorithms.packing import MicroBatch
from megatron_rl.algorithms.trained_tokens import TrainedTokens
from megatron_rl.learn.training.schedule import ModelInput
from megatron_rl.learn.training.training_batch import TrainingBatch, trained_index
from megatron_rl.model.platform.host_tensors import int64
from megatron_rl.model.policy import OutputPart, Policy
from megatron_rl.rank.metrics.stats import LossStats, combined
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.grpo import GrpoConfig


@dataclass(frozen=True, slots=True)
class Scores:
    """Knowledge of a batch, or of some of its tokens, before the first update. Each is [trained tokens], on the
    device."""

    before: Tensor | None = None
    answers: Tensor | None = None
    answer_tokens: Tensor | None = None
    reference: Tensor | None = None  # log-probs of the reference policy, if there is one
    teacher: Tensor | None = None  # log-probs of the teacher, if there is one
    teaching: Tensor | None = None
    """int64 index of the teaching in `Teachings.each`, -1 for none; None: the only one judges all."""
    distributions: Sequence[JudgedTokens] = ()
    """Distributions of each teacher with a `divergence`, on the last stage."""
    current: Tensor | None = None
    """bool, tokens whose ratio is relative to the weights before the step, that of the others to the weights that
    sampled them; None: that of all tokens is relative to the weights before the step."""
    recorded: Tensor | None = None
    """Receives the log-probs of the tokens that this rank predicts in the only update; None if none are recorded, or
    `before` has them."""

    def at(self, index: Tensor) -> Scores:
        """Return what is known of some tokens.

        index: [tokens] indices into the trained tokens.
        """
        known = (self.before, self.answers, self.answer_tokens, self.reference, self.teacher, self.teaching)
        before, answers, answer_tokens, reference, teacher, teaching = (
            None if each is None else each[index] for each in known
        )
        distributions = [each.at(index) for each in self.distributions]
        current = None if self.current is None else self.current[index]
        return Scores(before, answers, answer_tokens, reference, teacher, teaching, distributions, current)


Heard = Callable[[Tensor, ModelInput], None]
"""Receives the predictors of a micro-batch, [selected, hidden], on the last stage."""


@dataclass(frozen=True, slots=True)
class FirstPass:
    """The first pass over a step's batch, in which an objective may score it under any policy."""

    batch: TrainingBatch
    microbatches: Sequence[MicroBatch]
    inputs: Sequence[ModelInput]  # the micro-batches as the trained policy reads them
    context: dist.ProcessGroup
    score: Callable[..., Tensor]  # `Trainer.score`
    pack: Callable[[TrainingBatch, Sequence[int]], Sequence[MicroBatch]]
    """Packs sequences of a batch, equally many micro-batches on every rank. Collective over all ranks."""
    chosen: Sequence[int] | None = None
    """Sequences that a teacher judges, whose texts differ from those in `microbatches`; None: all, as they are."""
    row: Tensor | None = None
    """[trained tokens] on the CPU, row of each among those of the chosen sequences, -1 for the others; None: all are
    chosen."""

    @property
    def rows(self) -> int:
        """Trained tokens that a teacher judges."""
        return len(self.batch.inference_logprobs) if self.row is None else int((self.row >= 0).sum())

    def of(self, texts: Sequence[Branch], chosen: Sequence[int]) -> FirstPass:
        """Return the pass over some sequences, as a teacher reads them.

        texts: [sequences] with the loss masks of the batch's own trained tokens.
        """
        index = trained_index(self.batch.lengths, chosen)
        row = torch.full((int(self.batch.lengths.sum()),), -1)
        row[index] = torch.arange(len(index))
        return replace(self, batch=replace(self.batch, sequences=texts), chosen=chosen, row=row)

    def under_trained(self, policy: Policy) -> Tensor:
        """Score under the trained policy, whose routers replay choices if there are some. Collective."""
        return self.score(policy, self.batch, self.inputs)

    def under(self, policy: Policy) -> Tensor:
        """Score under a policy of the same shape as the trained one, by the choices of its own routers. Collective."""
        return self.score(policy, self.batch, [replace(each, replay=None) for each in self.inputs])

    def under_another(self, policy: Policy, heard: Heard | None = None) -> Tensor:
        """Score under a policy of any shape. heard: as for `Trainer.score`. Collective."""
        microbatches = self.microbatches if self.chosen is None else self.pack(self.batch, self.chosen)
        inputs = [ModelInput.of(policy, micro, self.context) for micro in microbatches]
        return self.score(policy, self.batch, inputs, heard)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Knowledge of a teacher about the chosen sequences of a pass."""

    logprobs: Tensor  # [trained tokens] of the sampled tokens; 0 for those of other sequences
    distributions: Distributions | None = None  # [FirstPass.rows], on the last stage, if the loss reads them


Teacher = Callable[[FirstPass], Judgement]  # Collective


@dataclass(frozen=True, slots=True)
class JudgedBatch:
    """Knowledge of all teachers about a batch."""

    logprobs: Tensor  # [trained tokens] of the sampled tokens; 0 for those that no teacher judges
    teaching: Tensor | None = None  # see `Scores.teaching`
    distributions: Sequence[JudgedTokens] = ()


Judges = Callable[[FirstPass], JudgedBatch]  # Collective


class Objective(ABC):
    """Goal of a run's updates."""

    temperature: float  # temperature of the distributions whose log-probs the loss reads
    entropy: Literal["value", "gradient"] = "value"  # whether the entropy of these distributions has a gradient
    absent: Sequence[str]  # fields of `LossStats` that are None

    @abstractmethod
    def credit(self, groups: Sequence[TrajectoryGroup], known: Tensor | None = None) -> Credit:
        """Return the credit of the answers to train on. known: as for `assign_credit`."""

    def scores(self, first_pass: FirstPass) -> Scores:
        """Return what the loss reads beside the policy's present log-probs; nothing by default. Collective."""
        return Scores()

    def divergences(
        self, hidden: Tensor, output: OutputPart, scored: Scores, allowed: AllowedTokens | None
    ) -> Tensor | None:
        """Return the divergences of some tokens from the teacher, with gradient, [tokens]; None if the loss reads none.
        Collective over the tensor-parallel ranks.

        hidden: [tokens, hidden] predictors. scored, allowed: of these tokens.
        """
        return None

    @abstractmethod
    def loss(self, tokens: TrainedTokens, scored: Scores) -> tuple[Tensor, LossStats]:
        """Return the loss of some tokens and its statistics. scored: of these tokens."""


class Supervised(Objective):
    """Cross-entropy of rows of data."""

    temperature = 1.0
    absent = (
        "clip_low",
        "clip_high",
        "kl",
        "importance_weight",
        "rejected",
        "teacher_kl",
        "judged",
        "teacher_divergence",
        "diverged",
    )

    def credit(self, groups: Sequence[TrajectoryGroup], known: Tensor | None = None) -> Credit:
        return credit_of_rows(groups)

    def loss(self, tokens: TrainedTokens, scored: Scores) -> tuple[Tensor, LossStats]:
        return supervised_loss(tokens)


class Grpo(Objective):
    """The objectives of GRPO's family: a policy loss, with a penalty for the distance from a reference policy, and a
    teacher that judges each sampled token."""

    def __init__(
        self, config: RunConfig, policy: Policy, reference: Policy | None, judges: Judges | None = None
    ) -> None:
        """
        policy: the trained one.
        reference: initial policy for the KL penalty, if there is one. It may be `policy`, which without its adapters is
            the initial one.

        Raises ConfigurationError for an unusable policy loss or baseline of the user's.
        """
        self.reference = reference
        self.judges = judges
        teachings = config.teachings.each
        # One more, for the index -1. On the device, because a copy in each loss would wait for it.
        self._weights = torch.tensor([*(one.weight for one in teachings), 0.0], device=policy.device)
        diverge = [*(one.divergence is not None for one in teachings), False]
        self._diverge = torch.tensor(diverge, device=policy.device)
        self._reads_divergences = judges is not None and config.teachings.diverge
        self._policy, self._config, self._algorithms = policy, config, config.algorithms.each
        self._algorithm_of = int64([config.algorithms.index(id) for id in config.environment_ids])
        self.temperature = config.sampling.temperature
        self.entropy = "gradient" if any(each.entropy_coefficient > 0 for each in self._algorithms) else "value"
        absent = {
            "clip_low": not config.grpo.is_bounded,
            "clip_high": not config.grpo.is_bounded,
            "kl": not config.algorithms.penalise_kl,
            "importance_weight": all(each.importance is None for each in self._algorithms),
            "rejected": all(each.rejection is None for each in self._algorithms),
            "teacher_kl": judges is None,
            "judged": judges is None,
            "teacher_divergence": not self._reads_divergences,
            "diverged": not self._reads_divergences,
            "by_environment": not config.environment_ids,
        }
        self.absent = [name for name, is_absent in absent.items() if is_absent]
        for each in self._algorithms:
            own_policy_loss(each)
            own_baseline(each)

    def credit(self, groups: Sequence[TrajectoryGroup], known: Tensor | None = None) -> Credit:
        return assign_credit(groups, self._config, known)

    def scores(self, first_pass: FirstPass) -> Scores:
        batch = first_pass.batch
        before, answers, answer_tokens, reference = None, None, None, None
        if self._config.scores_first:
            before = first_pass.under_trained(self._policy)
            if self._config.algorithms.compare_answers:
                ratios = before - batch.inference_logprobs
                answers, answer_tokens = answer_log_ratios(ratios, batch.trajectory_lengths)
        if self.reference is not None:
            with self.reference.without_adapters():
                reference = first_pass.under(self.reference)
        teacher = teaching = None
        distributions: Sequence[JudgedTokens] = ()
        if self.judges is not None:
            judged = self.judges(first_pass)
            teacher, teaching, distributions = judged.logprobs, judged.teaching, judged.distributions
        # A ratio needs the token's log-prob at some weights before this step. Those of the weights before the step are
        # at hand, those of older weights only as the engine computed them. For example, with max_lag 1 a token of
        # version 7 in step 9 is compared with the engine's log-prob at version 7, and one of version 8 with the
        # trainer's at version 8. With a correction (`grpo.importance`, `grpo.rejection`) all tokens are compared with
        # version 8, and the correction weighs the difference between 7 and 8.
        current = self._current(batch)
        return Scores(before, answers, answer_tokens, reference, teacher, teaching, distributions, current)

    def divergences(
        self, hidden: Tensor, output: OutputPart, scored: Scores, allowed: AllowedTokens | None
    ) -> Tensor | None:
        if not self._reads_divergences:
            return None
        found = [each.divergences(hidden, output, allowed) for each in scored.distributions]
        # A batch may lack answers of the environments with divergences. All ranks must still report the same sums.
        return torch.stack(found).sum(0) if found else torch.zeros(len(hidden), device=hidden.device)

    def loss(self, tokens: TrainedTokens, scored: Scores) -> tuple[Tensor, LossStats]:
        if len(self._algorithms) == 1:
            return self._loss(tokens, scored, self._algorithms[0])
        assert tokens.environment is not None  # algorithms differ between environments
        of_tokens = self._algorithm_of.to(tokens.environment.device)[tokens.environment]
        losses, stats = [], []
        for number, grpo in enumerate(self._algorithms):
            # Also without a token: losses of sequences wait for those of other ranks. The others keep their places, so
            # that nothing waits for the device, and mrl rehearse needs no values.
            its_tokens = replace(tokens, weights=torch.where(of_tokens == number, tokens.weights, 0.0))
            loss, its_stats = self._loss(its_tokens, scored, grpo)
            losses.append(loss)
            stats.append(self._with_all_means(its_stats, its_tokens, grpo))
        return torch.stack(losses).sum(), combined(stats)

    def _with_all_means(self, stats: LossStats, tokens: TrainedTokens, grpo: GrpoConfig) -> LossStats:
        """Return statistics of the tokens of one algorithm with sums that it lacks and another one has. The metrics of
        these are means over the tokens of all."""
        if stats.kl is None and tokens.ref_logprobs is not None:
            stats = replace(stats, kl=measured_kl(tokens, grpo))
        if stats.importance_weight is None and any(each.importance is not None for each in self._algorithms):
            rejected = 0.0 if stats.rejected is None else stats.rejected
            stats = replace(stats, importance_weight=stats.tokens - rejected)
        return stats

    def _loss(self, tokens: TrainedTokens, scored: Scores, grpo: GrpoConfig) -> tuple[Tensor, LossStats]:
        if scored.teacher is None:
            return grpo_loss(tokens, grpo)
        teaching = 0 if scored.teaching is None else scored.teaching
        taught = TaughtTokens(scored.teacher, self._weights[teaching], self._diverge[teaching])
        return distillation_loss(tokens, taught, grpo)

    def _current(self, batch: TrainingBatch) -> Tensor | None:
        """Return `Scores.current` of a batch."""
        corrects = [each.corrects for each in self._algorithms]
        if batch.current is None or not any(corrects):
            return batch.current
        if all(corrects):
            return None
        assert batch.environments is not None  # algorithms differ between environments
        of_environments = torch.tensor(corrects)[self._algorithm_of].to(batch.environments.device)
        return batch.current | of_environments[batch.environments]


def objective_of(
    config: RunConfig, policy: Policy, reference: Policy | None, judges: Judges | None = None
) -> Objective:
    """Return the objective that the recipe asks for; arguments as for `Grpo`."""
    return Supervised() if config.supervised else Grpo(config, policy, reference, judges)


def trained_tokens(
    batch: TrainingBatch,
    index: Tensor,
    per_sequence: Tensor,
    scored: Scores,
    logprobs: Tensor,
    entropy: Tensor,
    context: dist.ProcessGroup,
    environments: int = 0,
) -> TrainedTokens:
    """Return some tokens of a batch as a loss reads them.

    Args:
        index: [tokens] their indices.
        per_sequence: see `UpdateInput.per_sequence`.
        scored: of these tokens.
        logprobs, entropy: [tokens] of the policy in training.
        context: see `TrainedTokens.context`.
        environments: their number, where the batch has several.
    """
    inference = batch.inference_logprobs[index]
    sequence = batch.sequence_of_token[index]
    weights, advantages = per_sequence[:, sequence]
    if batch.advantages is not None:
        advantages = batch.advantages[index]
    old = logprobs.detach() if scored.before is None else scored.before
    if scored.current is not None:
        old = torch.where(scored.current, old, inference)
    return TrainedTokens(
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
        environment=None if batch.environments is None else batch.environments[index],
        environments=0 if batch.environments is None else environments,
        context=context,
    )
