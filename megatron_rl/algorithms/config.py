"""Recipe keys of GRPO."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rl.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

KlEstimator = Literal["k1", "k2", "k3"]

LossReduction = Literal["token", "sequence"]

Baseline = Literal["group", "batch"]


class OverlongConfig(Section):
    """What happens to answers that hit `sampling.max_new_tokens`."""

    mode: Literal["none", "mask", "penalty"] = "none"
    """none: as scored. mask: their tokens carry no loss. penalty: DAPO's soft punishment (arXiv 2503.14476 eq. 13)."""
    buffer: NonNegativeInt = 0
    """Tokens before the limit over which the penalty grows linearly (`mode: penalty`)."""
    penalty: NonNegativeFloat = 1.0
    """Reward taken away at the limit (`mode: penalty`)."""

    @model_validator(mode="after")
    def _has_buffer(self) -> OverlongConfig:
        if self.mode == "penalty" and self.buffer == 0:
            raise ValueError("mode: penalty needs buffer, the tokens over which the penalty grows")
        return self


class DynamicSamplingConfig(Section):
    """Draw further prompts in place of groups whose rewards, before any overlong penalty, are all equal (DAPO): at once
    as many as probably suffice, by the share that had signal so far. Groups that are drawn too much begin the next
    step."""

    enabled: bool = False
    max_rounds: PositiveInt = 8
    """At most so many times prompts_per_step prompts are drawn for a step; then it trains with the groups without
    signal it has."""


class ImportanceConfig(Section):
    """Correction for what was sampled by another policy than that before the step: by an engine whose log-probs are not
    quite the trainer's, or by older weights. Each token's loss has a weight, by what it or its answer was likelier
    before the step than where it was sampled; clipping is then around the policy before the step whatever sampled it
    (decoupled PPO, arXiv 2505.24298)."""

    mode: Literal["truncate", "mask", "sequence"] = "truncate"
    """truncate: min(r, cap) with r of the token. mask: r, or 0 where it is not between 1 / cap and cap. sequence:
    min(r, cap) with r of all trained tokens of the answer together; takes a forward pass more where there is one
    update a step."""
    cap: PositiveFloat
    """Bound of a weight; `mode: mask` needs one above 1."""

    @model_validator(mode="after")
    def _keeps_something(self) -> ImportanceConfig:
        if self.mode == "mask" and self.cap <= 1:
            raise ValueError(f"mode: mask with cap {self.cap} keeps no token: choose a cap above 1, such as 2")
        return self


class GrpoConfig(Section):
    prompts_per_step: PositiveInt = 32
    group_size: Annotated[int, Field(ge=2)] = 16
    """Answers per prompt."""
    global_batch: PositiveInt | None = None
    """Answers per optimizer step; default prompts_per_step * group_size. A multiple of group_size."""
    iterations: PositiveInt = 1
    """Passes over each batch of rollouts."""
    eps_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Importance ratios are clipped to [1 - eps_low, 1 + eps_high]."""
    eps_high: NonNegativeFloat = 0.2
    baseline: Baseline = "group"
    """What a reward is compared with. group: those of the other answers to its prompt. batch: those of all answers of
    the step (REINFORCE++, arXiv 2501.03262), so that where no answer to a prompt is right, all of them become less
    likely and others are tried; every answer goes through the model then, which takes longer."""
    advantage_std: bool = True
    """Divide advantages by the standard deviation of these rewards; false is, by group, Dr. GRPO (arXiv 2503.20783)."""
    reduction: LossReduction = "token"
    """token: mean over all answer tokens of the global batch. sequence: mean over answers of their token means."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the KL penalty to the initial weights; at 0 the reference model is neither kept nor run."""
    kl_estimator: KlEstimator = "k3"
    """http://joschu.net/blog/kl-approx.html"""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Bonus on -p log p of the sampled tokens."""
    importance: ImportanceConfig | None = None
    """Importance sampling against the log-probs by which tokens were sampled; default: none. Then the log-probs of what
    older weights sampled are those that clipping is around."""
    overlong: OverlongConfig = OverlongConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()

    @model_validator(mode="after")
    def _batches_divide(self) -> GrpoConfig:
        rollouts = self.prompts_per_step * self.group_size
        if self.samples_per_update % self.group_size:
            raise ValueError(f"global_batch {self.global_batch} is not a multiple of group_size {self.group_size}")
        if rollouts % self.samples_per_update:
            raise ValueError(
                f"prompts_per_step * group_size = {rollouts} is not divisible by global_batch {self.global_batch}"
            )
        return self

    @property
    def samples_per_update(self) -> int:
        return self.global_batch or self.prompts_per_step * self.group_size

    def answers_of_replica(self, replicas: int) -> int:
        """The most answers that one of the data-parallel replicas has in an optimizer step."""
        prompts = -(-self.prompts_per_step // replicas)
        return -(-prompts * self.group_size // self.updates_per_pass)

    @property
    def scores_first(self) -> bool:
        """Whether a step runs the policy once more before its updates: with a single one its own pass is at those
        weights."""
        of_answers = self.importance is not None and self.importance.mode == "sequence"
        return self.updates_per_pass * self.iterations > 1 or of_answers

    @property
    def updates_per_pass(self) -> int:
        return self.prompts_per_step * self.group_size // self.samples_per_update
