"""Metrics of learning: rewards, loss, policy, and how the policy that sampled differs from the one that is trained."""

from __future__ import annotations

import math
from typing import Any

from megatron_rl.rank.metrics.metric import Metric, StepReport, if_trained, of_answers, of_tokens


def _reward_std(step: StepReport) -> float:
    batch = step.stats.batch
    mean = float(batch.reward / batch.answers)
    return math.sqrt(max(0.0, float(batch.reward_squared / batch.answers) - mean**2))


def _nonzero_groups(step: StepReport) -> Any:
    batch, loss = step.stats.batch, step.stats.loss
    return None if loss is not None and loss.teacher_kl is not None else batch.groups_with_signal / batch.groups


def _share(total: Any, tokens: Any) -> Any:
    return total / tokens if total is not None and tokens else None


def _replay_differing(step: StepReport) -> Any:
    router = step.stats.router
    return router.differing / router.replayed if router and router.replayed else None


LEARNING: dict[str, Metric] = {
    "answers": Metric("answers scored", lambda step: int(step.stats.batch.answers), unit="answers"),
    "mean_reward": Metric(
        "mean reward of the step's answers, as scored",
        of_answers(lambda s: s.batch.reward),
        unit="reward",
        good="rises, with noise, until the problems are solved",
    ),
    "right_ratio": Metric(
        "share of answers that are right: whose accuracy (`environment.accuracy`, by default the reward) is 1, as in "
        "evaluations",
        of_answers(lambda s: s.batch.right),
        unit="share",
        good="rises with the reward; 0 throughout is fine where no answer can earn exactly 1",
        advice="If the reward rises and this does not, the answers earn parts of the reward only: look at "
        "`reward/...`.",
    ),
    "reward_std": Metric(
        "standard deviation of the rewards of the step's answers",
        _reward_std,
        unit="reward",
        good="above 0",
    ),
    "nonzero_groups_ratio": Metric(
        "share of groups whose rewards differ, the only ones with a gradient (absent with a teacher, which gives all "
        "groups one)",
        _nonzero_groups,
        unit="share",
        good="0.2 to 0.9",
    ),
    "epoch": Metric(
        "passes over the rows of data at the end of the step (training.objective: supervised); of several sets, rows "
        "trained on divided by the rows of all sets",
        lambda step: step.next_ordinal / step.rows if step.rows else None,
        unit="passes",
        good="1 to 3",
        advice="More passes memorise the rows: compare the loss on held-out rows (data.held_out), or accuracy.",
    ),
    "loss": Metric(
        "loss, mean over the step's updates; with training.objective: supervised the mean of -log p of the learned "
        "tokens",
        lambda step: (step.stats.loss.loss if step.stats.loss else 0.0) / step.stats.update.updates,
        good="near 0 for policy losses, where it says little; falls in supervised training",
    ),
    "grad_norm": Metric(
        "gradient norm before clipping, mean over the step's applied updates",
        lambda step: step.stats.update.grad_norm / step.stats.update.applied if step.stats.update.applied else None,
        good="0.01 to 10, single steps of a few hundred",
    ),
    "learning_rate": Metric(
        "learning rate of the step's last update",
        lambda step: step.stats.update.learning_rate,
        good="about 1e-6 for all weights of a large model, 1e-5 to 1e-4 for adapters",
    ),
    "entropy": Metric(
        "mean entropy in nats of the distributions the trained tokens were drawn from, full vocabulary",
        of_tokens(lambda loss: loss.entropy),
        unit="nats per token",
        good="falls slowly",
    ),
    "clip_fraction": Metric(
        "share of the trained tokens whose gradient a bound of the policy loss removed or, in cispo, reduced (absent "
        "for a loss without bounds)",
        of_tokens(lambda loss: None if loss.clip_low is None else loss.clip_low + (loss.clip_high or 0.0)),
        unit="share",
        good="0 with one update per step on fresh answers, below 0.2 with several; for gspo 0.1 to 0.65",
    ),
    "clip_fraction_low": Metric(
        "share of the trained tokens whose gradient the lower bound of the policy loss removed",
        of_tokens(lambda loss: loss.clip_low),
        unit="share",
    ),
    "clip_fraction_high": Metric(
        "share of the trained tokens whose gradient the upper bound of the policy loss removed or reduced",
        of_tokens(lambda loss: loss.clip_high),
        unit="share",
    ),
    "kl": Metric(
        "mean KL estimate to the initial weights (kl_beta > 0)",
        of_tokens(lambda loss: loss.kl),
        unit="nats per token",
        good="rises slowly; below 1",
        advice="A larger `grpo.kl_beta` holds the policy back, a lower `optimizer.learning_rate` slows it.",
    ),
    "teacher_kl": Metric(
        "estimate of KL(policy || teacher) per token in nats: mean of log p(policy before the step) - log p(teacher) "
        "of the trained tokens that a teacher judges (distill)",
        if_trained(lambda loss: _share(loss.teacher_kl, loss.judged)),
        unit="nats per token",
        good="falls towards 0",
        advice="If it does not fall, raise `optimizer.learning_rate`; if it rises, check that the teacher has the same "
        "tokenizer and chat template.",
    ),
    "teacher_divergence": Metric(
        "mean of `distill.divergence` over the trained tokens that have one, before the factor `distill.weight`",
        if_trained(lambda loss: _share(loss.teacher_divergence, loss.diverged)),
        unit="nats per token",
        good="falls towards 0",
        advice="If it does not fall, raise `optimizer.learning_rate` or `distill.weight`.",
    ),
    "prediction_loss": Metric(
        "mean of -log p of the trained tokens under the prediction layer, before the factor "
        "`model.prediction_loss_coefficient`",
        if_trained(lambda loss: loss.prediction / loss.predicted if loss.prediction and loss.predicted else None),
        unit="nats per token",
        good="falls, and follows the policy; of published weights it begins low",
        advice="If it does not fall, raise `optimizer.learning_rate`: where its gradient is clipped, a larger "
        "`model.prediction_loss_coefficient` changes nothing.",
    ),
    "importance_ratio": Metric(
        "mean of exp(log_prob - old_log_prob) of the trained tokens",
        of_tokens(lambda loss: loss.ratio),
        unit="ratio",
        good="0.9 to 1.1",
        advice="The updates of a step move the policy far: lower `optimizer.learning_rate` or take fewer updates.",
    ),
    "importance_ratio_max": Metric(
        "largest exp(log_prob - old_log_prob) of a trained token",
        if_trained(lambda loss: loss.ratio_max),
        unit="ratio",
    ),
    "importance_weight": Metric(
        "mean importance weight (grpo.importance)",
        of_tokens(lambda loss: loss.importance_weight),
        unit="ratio",
        good="0.9 to 1.1",
        advice="The engine's log-probs differ from the trainer's, or answers are old: see "
        "`inference_logprob_difference` and `staleness_mean`.",
    ),
    "rejected_fraction": Metric(
        "share of the trained tokens that `grpo.rejection` leaves out",
        of_tokens(lambda loss: loss.rejected),
        good="below 0.1",
        advice="The engine's log-probs differ from the trainer's, or answers are old: see "
        "`inference_logprob_difference` and `staleness_mean`; or widen the bounds.",
    ),
    "inference_logprob_difference": Metric(
        "mean |training - engine log-prob| of the trained tokens",
        of_tokens(lambda loss: loss.inference_difference),
        unit="nats",
        good="below 1e-5 in fp32, 0.005 to 0.02 in bf16, up to 0.2 with 8 bits in vLLM; larger with `async.max_lag`, "
        "which trains on answers of older weights",
    ),
    "inference_logprob_difference_max": Metric(
        "largest |training - engine log-prob| of a trained token",
        if_trained(lambda loss: loss.inference_difference_max),
        unit="nats",
    ),
    "router_replay_differing": Metric(
        "share of the replayed choices of experts, of a token in a layer, that differ from what the router would have "
        "chosen, in all passes of the step (model.router_replay)",
        _replay_differing,
        unit="share",
        good="below 0.1 in bf16; larger with `async.max_lag` and several updates per step",
        advice="Look at `inference_logprob_difference`: if it is large too, the engine rounds weights "
        "(`inference.vllm.args`). Else the policy moves much between versions: lower `optimizer.learning_rate`.",
    ),
    "router_replay_missing": Metric(
        "tokens that trained by their router's own choices, because no engine returned any: those of answers of an "
        "engine that was lost, or of a bank without choices (model.router_replay: rollout)",
        lambda step: int(step.stats.router.missing) if step.stats.router else None,
        unit="tokens",
        good="0, or few after a replica was lost",
        advice="Look for replicas that restart (`mrl logs`).",
    ),
    "nonfinite_tokens": Metric(
        "tokens left out of the loss because a log-prob of the policy or the engine, or the entropy, is not finite "
        "(absent if there are none)",
        lambda step: (step.stats.loss.nonfinite or None) if step.stats.loss else None,
        unit="tokens",
        good="absent",
    ),
    "staleness_mean": Metric(
        "mean optimizer steps between the weights that sampled and those trained",
        of_answers(lambda s: s.batch.staleness),
        unit="optimizer steps",
        good="0 without `async.max_lag`",
    ),
    "staleness_max": Metric(
        "most optimizer steps between the weights that sampled an answer and those trained",
        lambda step: step.stats.batch.staleness_max,
        unit="optimizer steps",
    ),
    "skipped_updates": Metric(
        "updates of this step skipped for a non-finite gradient",
        lambda step: int(step.stats.update.updates - step.stats.update.applied),
        unit="updates",
        good="0",
    ),
    "policy_version": Metric(
        "optimizer steps behind the weights at the end of the step",
        lambda step: step.policy_version,
        unit="optimizer steps",
    ),
}
