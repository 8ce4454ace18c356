"""Recipe keys of GRPO."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from megatron_rl.recipe.kept_answers import DynamicSamplingConfig, OverlongConfig
from megatron_rl.recipe.own_code import is_own, name_or_own, name_or_own_words
from megatron_rl.recipe.ratio_bounds import ImportanceConfig, RejectionConfig
from megatron_rl.recipe.section import (
    NonNegativeFloat,
    PathMark,
    PositiveFloat,
    PositiveInt,
    Section,
)

BASELINES = ("group", "leave_one_out", "batch", "maxrl", "pass_at_k", "per_reward")
POLICY_LOSSES = ("clip", "gspo", "gspo_token", "cispo", "sapo", "dppo", "reinforce")


BaselineName = Annotated[
    str,
    PathMark("code", read=False),  # as for PolicyLossName
    AfterValidator(lambda value: name_or_own(value, BASELINES)),
    Field(json_schema_extra={"words": name_or_own_words(BASELINES)}),
]

PolicyLossName = Annotated[
    str,
    PathMark("code", read=False),  # a run has its own copy and does not need the file
    AfterValidator(lambda value: name_or_own(value, POLICY_LOSSES)),
    Field(json_schema_extra={"words": name_or_own_words(POLICY_LOSSES)}),
]

KlEstimator = Literal["k1", "k2", "k3"]
LossReduction = Literal["token", "sequence", "constant"]
BranchWeighting = Literal["mean", "sum"]
AdvantageStd = Literal["population", "sample", "none"]
AdvantageStdOf = Literal["baseline", "batch", "advantages"]
BatchOver = Literal["answers", "tokens"]

CLIP_RANGES = {
    "gspo": (0.0003, 0.0004),
    "gspo_token": (0.0003, 0.0004),
    "cispo": (1.0, 4.0),
    "dppo": (0.15, 0.15),
}
"""Default eps_low and eps_high by policy loss, where it is not USUAL_RANGE."""
RANGE_OF_KL = (0.05, 0.05)  # the same of `policy_loss: dppo` with `dppo_divergence: kl`
USUAL_RANGE = (0.2, 0.2)
USUAL_DUAL_CLIP = 3.0  # default of dual_clip where tokens may be off policy
WIDEST_OF_GSPO = 0.1  # largest eps_low and eps_high that gspo accepts
OF_BOUNDED = frozenset({"eps_low", "eps_high"})
READ_BY = {
    "clip": OF_BOUNDED | {"dual_clip"},
    "gspo": OF_BOUNDED,
    "gspo_token": OF_BOUNDED,
    "cispo": OF_BOUNDED,
    "sapo": frozenset({"sapo_tau_positive", "sapo_tau_negative"}),
    "dppo": OF_BOUNDED | {"dppo_divergence"},
    "reinforce": frozenset[str](),
}
"""Keys that each policy loss reads; the other ones of these must be null."""


_OWN_DIVISOR: dict[str, tuple[tuple[AdvantageStd, ...], str]] = {
    "maxrl": (("none",), "divides by the mean of the group"),
    "pass_at_k": (("population", "none"), "divides by the deviation of all sets of answers, which is not a sample"),
    "per_reward": (("population", "sample"), "normalises each component"),
}
"""Baseline -> values of advantage_std that it allows, and why."""


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
    policy_loss: PolicyLossName = "clip"
    """Loss of a token, given its advantage (docs/losses.md has the formulas). clip: clipped ratio, as in PPO. gspo:
    clipped ratio of the whole sequence (arXiv 2507.18071); gspo_token: its token variant. cispo: bounded weights of the
    gradient (arXiv 2506.13585). sapo: soft gates (arXiv 2511.20347). dppo: a trust region by divergence (arXiv
    2602.04879). reinforce: neither ratio nor bounds. module:function: your own."""
    eps_low: Annotated[float, Field(ge=0, le=1)] | None = None
    """Ratios of new to old probability are clipped to [1 - eps_low, 1 + eps_high]; for dppo, the largest divergence.
    Default: 0.2; gspo, gspo_token: 0.0003; cispo: 1, not a bound; dppo: 0.15, by kl 0.05."""
    eps_high: NonNegativeFloat | None = None
    """Upper clip range; larger than eps_low is DAPO's clip-higher. Default: 0.2; gspo, gspo_token: 0.0004; cispo: 4;
    dppo: 0.15, by kl 0.05."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bounds the loss of tokens of negative advantage at dual_clip times the advantage (arXiv 1912.09729; `policy_loss:
    clip`). Default: 3, as in the paper and verl, where a step has several updates or async.max_lag is above 0, else no
    bound; null: no bound. Without it a token that an update made 20,000 times as likely has 20,000 times the
    gradient."""
    sapo_tau_positive: PositiveFloat | None = None
    """Temperature of the gates of tokens of positive advantage (`policy_loss: sapo`); default: 1."""
    sapo_tau_negative: PositiveFloat | None = None
    """Temperature of the gates of the other tokens (`policy_loss: sapo`); default: 1.05."""
    dppo_divergence: Literal["tv", "kl"] | None = None
    """Divergence of the two-valued distributions of the token and all others (`policy_loss: dppo`). tv: total
    variation. kl: Kullback-Leibler. Default: tv."""
    baseline: BaselineName = "group"
    """Rewards that the reward of an answer is compared with (docs/advantages.md has the formulas). group: the mean of
    all answers to its prompt. leave_one_out: the mean of the other answers to its prompt (RLOO, arXiv 2402.14740).
    batch: the mean of all answers of the step (REINFORCE++, arXiv 2501.03262); a prompt without any right answer still
    teaches: its answers become less likely, and every answer goes through the model, which takes longer. maxrl: the
    group's mean, which also divides the difference (arXiv 2602.02710): hard prompts weigh more. pass_at_k: a
    prompt earns the best reward of pass_k of its answers (arXiv 2508.10751, 2505.15201). per_reward: each component
    that environment.reward_weights names is compared and normalised alone, then they are added (GDPO, arXiv
    2601.05242). module:function: your own, which makes what it wants of the next four keys."""
    pass_k: PositiveInt | None = None
    """Answers that a prompt is given, for `baseline: pass_at_k`; from 2 to group_size."""
    advantage_std: AdvantageStd = "population"
    """Standard deviation that divides advantages, plus 1e-4. population: the root of the mean square deviation
    of n rewards. sample: with n - 1 instead of n, as TRL, verl, NeMo-RL and SkyRL divide: for 16 answers advantages are
    3.2% smaller, for 4 they are 13% smaller. none: not divided; with `baseline: group` and the reduction of Dr. GRPO
    that is Dr. GRPO (arXiv 2503.20783)."""
    advantage_std_of: AdvantageStdOf = "baseline"
    """Values whose standard deviation divides. baseline: the rewards that baseline is taken from. batch: the rewards of
    all answers of the step (Lite PPO, arXiv 2508.08221). advantages: the advantages of all answers of the step, whose
    mean is subtracted first (REINFORCE++-baseline with `baseline: group`)."""
    batch_over: BatchOver = "answers"
    """Count of an answer in means and deviations over the step. answers: once (TRL, OpenRLHF). tokens: once for each of
    its trained tokens, so long answers count more (verl, NeMo-RL, SkyRL)."""
    turn_discount: Annotated[float, Field(ge=0, le=1)] | None = None
    """Credit by turn, for agents whose environment reports rewards by turn (docs/advantages.md). The return of a turn
    is its reward plus turn_discount times the return of the next one; 0: its reward, 1: the sum of what follows. It is
    compared with the returns of the group's turns that have the same key, or without keys the same number, as baseline
    and advantage_std compare answers: GiGPO (arXiv 2505.10978; 0.95 in its experiments). The advantage of a turn's
    tokens is episode_weight * A_episode + turn_weight * A_turn. Default: none; all turns have the advantage of the
    answer."""
    turn_weight: NonNegativeFloat = 1.0
    """Weight of the advantages of turns, with turn_discount."""
    episode_weight: NonNegativeFloat = 1.0
    """Weight of the advantage of the answer, with turn_discount; 0: turns have the advantages of their returns
    alone."""
    length_penalty: NonNegativeFloat = 0.0
    """Weight of a reward for short answers, relative to the other answers to the prompt: up to +1/2 for a right answer,
    down to -1/2 for any (Kimi k1.5, arXiv 2501.12599). Answers with an accuracy of 1 or more are right."""
    reduction: LossReduction = "token"
    """token: mean over all answer tokens of the global batch (DAPO). sequence: mean over answers of their token means
    (GRPO). constant: mean over answers of their token sums, divided by reduction_length (Dr. GRPO)."""
    reduction_length: PositiveInt | None = None
    """Divisor of `reduction: constant`, in tokens; default: sampling.max_new_tokens."""
    branches: BranchWeighting = "mean"
    """Weight of a rollout with several sequences of tokens. mean: the weight of each token is divided by their number,
    so the rollout counts like one with a single sequence of their mean length. sum: each sequence counts like a
    separate answer."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the KL penalty to the initial weights. At 0 no reference model is kept or run."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of the KL divergence (http://joschu.net/blog/kl-approx.html)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: the penalty is added to the loss of each token. reward: the penalty at the weights before the step is
    subtracted from the advantage of each token, so the policy loss applies to it."""
    kl_importance: bool = False
    """Multiply the penalty in the loss by the ratio of new to old probability (arXiv 2512.02556, section 3.1), so that
    its gradient stays that of the KL divergence after the first update of a step."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of an entropy bonus: the entropy of the distribution over the whole vocabulary, in nats, averaged like the
    loss."""
    importance: ImportanceConfig | None = None
    """Importance sampling against the log-probs of sampling. Default: upper 2.0 where async.max_lag is above 0 or
    inference.engine is vllm, unless rejection is given, else none; null: none. TRL and NeMo-RL correct by default in
    these cases, too. Without it and rejection, tokens sampled by older weights are clipped relative to those
    weights."""
    rejection: RejectionConfig | None = None
    """Tokens and answers that are not trained on, by the same ratio; default: none."""
    overlong: OverlongConfig = OverlongConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()

    @model_validator(mode="after")
    def _loss_reads_its_keys(self) -> GrpoConfig:
        loss = self.policy_loss
        reads = None if is_own(loss) else READ_BY[loss]
        for key in sorted(frozenset[str]().union(*READ_BY.values())):
            value = getattr(self, key)
            if value is not None and reads is not None and key not in reads:
                of = ", ".join(name for name, keys in READ_BY.items() if key in keys)
                raise ValueError(f"{key} {value} is not read by policy_loss {loss}, only by {of}: set {key} to null")
        if loss in ("gspo", "gspo_token") and max(self.clip_range) > WIDEST_OF_GSPO:
            key = "eps_high" if self.clip_range[1] > WIDEST_OF_GSPO else "eps_low"
            raise ValueError(
                f"{key} {getattr(self, key)} would clip nothing: the ratio of policy_loss {loss} is a mean over the "
                "sequence and stays close to 1. Set eps_low and eps_high to 0.0003 and 0.0004 as in the paper, or to "
                "null"
            )
        return self

    @model_validator(mode="after")
    def _terms_fit(self) -> GrpoConfig:
        if self.rejection and self.rejection.level == "token" and self.policy_loss == "gspo":
            raise ValueError(
                "rejection.level token excludes single tokens, and policy_loss gspo gives all tokens of a sequence one "
                "ratio: set rejection.level to sequence or geometric, or rejection to null"
            )
        if self.kl_in == "reward" and self.kl_importance:
            raise ValueError("kl_importance weighs the penalty in the loss, and kl_in is reward: remove one of the two")
        if self.reduction_length is not None and self.reduction != "constant":
            raise ValueError(
                f"reduction_length {self.reduction_length} is read only by reduction: constant, and reduction is "
                f"{self.reduction}"
            )
        return self

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

    @field_validator("advantage_std", mode="before")
    @classmethod
    def _std_is_named(cls, value: object) -> object:
        if isinstance(value, bool):
            was = "population" if value else "none"
            raise ValueError(f"it is population, sample or none; {str(value).lower()} of earlier recipes is {was}")
        return value

    @model_validator(mode="after")
    def _advantages_fit(self) -> GrpoConfig:
        if is_own(self.baseline):
            return self
        if self.baseline == "pass_at_k":
            if self.pass_k is None or not 2 <= self.pass_k <= self.group_size:
                raise ValueError(
                    f"baseline pass_at_k needs pass_k from 2 to group_size {self.group_size}; it is {self.pass_k}"
                )
        elif self.pass_k is not None:
            raise ValueError(f"pass_k is set, and baseline {self.baseline} does not read it: leave it out")
        if self.baseline in _OWN_DIVISOR:
            allowed, why = _OWN_DIVISOR[self.baseline]
            if self.advantage_std not in allowed:
                raise ValueError(
                    f"baseline {self.baseline} {why}, and advantage_std is {self.advantage_std}: set it to "
                    f"{' or '.join(allowed)}"
                )
        if self.baseline in ("maxrl", "per_reward"):
            key = "length_penalty" if self.length_penalty else "overlong.mode penalty"
            if self.length_penalty or self.overlong.mode == "penalty":
                raise ValueError(f"baseline {self.baseline} reads rewards that {key} would spoil: leave {key} out")
        if self.baseline in ("batch", "per_reward") and self.advantage_std_of != "baseline":
            raise ValueError(
                f"baseline {self.baseline} normalises over the step already, and advantage_std_of is "
                f"{self.advantage_std_of}: leave it out"
            )
        if self.advantage_std == "none" and self.advantage_std_of != "baseline":
            raise ValueError(f"advantage_std_of is {self.advantage_std_of}, and advantage_std is none: nothing divides")
        over_batch = self.baseline in ("batch", "per_reward") or self.advantage_std_of != "baseline"
        if self.batch_over == "tokens" and not over_batch:
            raise ValueError(
                f"batch_over is tokens, and nothing is taken over the step with baseline {self.baseline} and "
                "advantage_std_of baseline: leave batch_over out"
            )
        return self

    @model_validator(mode="after")
    def _turns_are_compared(self) -> GrpoConfig:
        if self.turn_discount is None:
            for key in ("turn_weight", "episode_weight"):
                if getattr(self, key) != 1.0:
                    raise ValueError(f"{key} is set, and turn_discount is not: set turn_discount, or leave {key} out")
            return self
        if self.policy_loss == "gspo":
            raise ValueError(
                "turn_discount gives the turns of a sequence different advantages, and policy_loss gspo has one ratio "
                "for all of its tokens: set policy_loss to gspo_token, or leave turn_discount out"
            )
        if self.baseline not in ("group", "leave_one_out") or self.advantage_std_of != "baseline":
            raise ValueError(
                "turn_discount compares turns of the answers to one prompt: set baseline to group or leave_one_out, "
                f"and advantage_std_of to baseline; they are {self.baseline} and {self.advantage_std_of}"
            )
        if not self.turn_weight and not self.episode_weight:
            raise ValueError("turn_weight and episode_weight are both 0: no answer would have an advantage")
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """eps_low and eps_high, or their defaults for the policy loss."""
        low, high = CLIP_RANGES.get(self.policy_loss, USUAL_RANGE)
        if self.policy_loss == "dppo" and self.dppo_divergence == "kl":
            low, high = RANGE_OF_KL
        return low if self.eps_low is None else self.eps_low, high if self.eps_high is None else self.eps_high

    @property
    def is_bounded(self) -> bool:
        """Whether the policy loss has bounds, and counts the tokens beyond them."""
        return "eps_low" in READ_BY.get(self.policy_loss, ())

    @property
    def own_functions(self) -> dict[str, str]:
        """Keys of this section that name functions of the user's -> their references (`own_code.CodeReference`)."""
        named = {"policy_loss": self.policy_loss, "baseline": self.baseline}
        return {key: value for key, value in named.items() if is_own(value)}

    @property
    def samples_per_update(self) -> int:
        return self.global_batch or self.prompts_per_step * self.group_size

    def answers_of_replica(self, replicas: int) -> int:
        """Largest number of answers that one data-parallel replica has in an optimizer update."""
        prompts = -(-self.prompts_per_step // replicas)
        return -(-prompts * self.group_size // self.updates_per_pass)

    @property
    def corrects(self) -> bool:
        """Whether tokens of older weights are compared with the policy before the step, and not clipped relative to
        their own weights."""
        return self.importance is not None or self.rejection is not None

    @property
    def trains_all_answers(self) -> bool:
        """Whether answers with an advantage of 0 are trained on too: a penalty or a bonus has a gradient in each token,
        and a loss of the user's may have."""
        return self.kl_beta > 0 or self.entropy_coefficient > 0 or is_own(self.policy_loss)

    @property
    def compares_answers(self) -> bool:
        """Whether the importance weight of a token, or its rejection, depends on its whole answer."""
        return any(one is not None and one.level != "token" for one in (self.importance, self.rejection))

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of a step. Each makes a policy version."""
        return self.updates_per_pass * self.iterations

    @property
    def updates_per_pass(self) -> int:
        return self.prompts_per_step * self.group_size // self.samples_per_update
