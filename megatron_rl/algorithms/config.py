"""Recipe keys of GRPO."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rl.recipe.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

KlEstimator = Literal["k1", "k2", "k3"]

LossReduction = Literal["token", "sequence"]

BranchWeighting = Literal["mean", "sum"]

Baseline = Literal["group", "batch"]


class OverlongConfig(Section):
    """Treatment of answers that reach `sampling.max_new_tokens`."""

    mode: Literal["none", "mask", "penalty"] = "none"
    """none: as scored. mask: their tokens carry no loss. penalty: DAPO's soft punishment (arXiv 2503.14476, equation
    13)."""
    buffer: NonNegativeInt = 0
    """Tokens before the limit over which the penalty grows linearly (`mode: penalty`)."""
    penalty: NonNegativeFloat = 1.0
    """Amount subtracted from the reward at the limit (`mode: penalty`)."""

    @model_validator(mode="after")
    def _has_buffer(self) -> OverlongConfig:
        if self.mode == "penalty" and self.buffer == 0:
            raise ValueError("mode: penalty needs buffer, the tokens over which the penalty grows")
        return self


class DynamicSamplingConfig(Section):
    """Replace groups whose rewards are all equal, before any overlong penalty, by further prompts (DAPO). The number of
    prompts drawn at once is estimated from the recent share of groups with signal. Surplus groups are carried into the
    next step."""

    enabled: bool = False
    """Turn dynamic sampling on."""
    max_rounds: PositiveInt = 8
    """Limit of the prompts drawn for a step: max_rounds * prompts_per_step. After that the step trains on what it has,
    groups without signal included."""


class ImportanceConfig(Section):
    """Correction for tokens that another policy sampled than the one before the step: an engine whose log-probs differ
    slightly from the trainer's, or older weights. The loss of each token is multiplied by an importance weight, the
    ratio r = p(before the step) / p(when sampled). Clipping is then relative to the policy before the step (decoupled
    PPO, arXiv 2505.24298)."""

    mode: Literal["truncate", "mask", "sequence"] = "truncate"
    """truncate: min(r, cap) with r of the token. mask: r, or 0 where r is not between 1 / cap and cap. sequence: min(r,
    cap) with the product of r over all trained tokens of the answer; costs one more forward pass where a step has a
    single update."""
    cap: PositiveFloat
    """Upper bound of the weight; `mode: mask` needs more than 1."""

    @model_validator(mode="after")
    def _keeps_something(self) -> ImportanceConfig:
        if self.mode == "mask" and self.cap <= 1:
            raise ValueError(f"mode: mask with cap {self.cap} keeps no token: choose a cap above 1, such as 2")
        return self


class GrpoConfig(Section):
    """Group Relative Policy Optimization and its variants."""

    prompts_per_step: PositiveInt = 32
    """Prompts per step, each with group_size answers."""
    group_size: Annotated[int, Field(ge=2)] = 16
    """Answers per prompt."""
    global_batch: PositiveInt | None = None
    """Answers per optimizer update, a multiple of group_size; default: prompts_per_step * group_size, which is one
    update per step."""
    iterations: PositiveInt = 1
    """Passes over each batch of answers."""
    eps_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Ratios of new to old probability are clipped to [1 - eps_low, 1 + eps_high]."""
    eps_high: NonNegativeFloat = 0.2
    """Upper clip range; larger than eps_low is DAPO's clip-higher."""
    baseline: Baseline = "group"
    """Rewards that the reward of an answer is compared with. group: those of the other answers to its prompt. batch:
    those of all answers of the step (REINFORCE++, arXiv 2501.03262). With batch, a prompt without any right answer
    still teaches: its answers become less likely. Every answer then goes through the model, which takes longer."""
    advantage_std: bool = True
    """Divide advantages by the standard deviation of the rewards of the baseline; false with `baseline: group` is Dr.
    GRPO (arXiv 2503.20783)."""
    reduction: LossReduction = "token"
    """token: mean over all answer tokens of the global batch (DAPO). sequence: mean over answers of their token means
    (GRPO)."""
    branches: BranchWeighting = "mean"
    """Weight of a rollout with several sequences of tokens. mean: the weight of each token is divided by their number,
    so the rollout counts like one with a single sequence of their mean length. sum: each sequence counts like an answer
    of its own."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the KL penalty to the initial weights. At 0 no reference model is kept or run."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of the KL divergence (http://joschu.net/blog/kl-approx.html)."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of an entropy bonus, -p log p of the sampled tokens."""
    importance: ImportanceConfig | None = None
    """Importance sampling against the log-probs of sampling; default: none. Without it, tokens sampled by older weights
    are clipped relative to those weights."""
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
        """Answers per optimizer update."""
        return self.global_batch or self.prompts_per_step * self.group_size

    def answers_of_replica(self, replicas: int) -> int:
        """Largest number of answers that one data-parallel replica has in an optimizer update."""
        prompts = -(-self.prompts_per_step // replicas)
        return -(-prompts * self.group_size // self.updates_per_pass)

    @property
    def scores_first(self) -> bool:
        """Whether a step runs the policy once before its updates. A step with a single update needs no such pass: its
        own forward pass is at the weights before the step."""
        of_answers = self.importance is not None and self.importance.mode == "sequence"
        return self.updates_per_pass * self.iterations > 1 or of_answers

    @property
    def updates_per_pass(self) -> int:
        """Optimizer updates in one pass over a step's answers."""
        return self.prompts_per_step * self.group_size // self.samples_per_update
