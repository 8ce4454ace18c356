"""Registry of every metric, with its meaning and formula, for console, TensorBoard and metrics.jsonl.

Names under time/ throughput/ system/ may differ between two runs of the same recipe; all others are reproducible.
A value that does not exist in a step is absent from its line, never NaN.

Without kl_beta and entropy_coefficient, answers whose advantage is 0 have no gradient and are not run through the
model. *Trained tokens* are those of the answers that are run: none in a group whose rewards are all equal. The loss is
the mean over all answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.metrics.stats import DeviceStats, EnvironmentStats, LossStats, Number, StepStats

TIMED = ("generate", "reward", "log-probs", "train", "offload", "refit", "wait")
"""Timeline categories that belong to a step; work between two steps has others."""

PROMPT_TOO_LONG = "prompt too long"
OVERDUE_ANSWERS = "overdue"
"""Reasons in `dropped_ordinals`."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Counts of a step, of one rank or of all ranks; metrics are made of the latter. Only `stats`, `dropped`,
    `failures` and `components` differ between ranks."""

    step: int
    stats: StepStats
    generation_rounds: int
    first_ordinal: int
    next_ordinal: int
    policy_version: int
    """Policy version at the end of the step."""
    dropped: Mapping[int, str]
    """Ordinals settled without training, each with the reason, in order."""
    failures: Mapping[str, int]
    """Answers lost, by reason."""
    components: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Sum of each component of the rewards, and the number of answers that have it."""
    tracebacks: Mapping[str, str] = field(default_factory=dict)
    """Tracebacks of errors in the task's code that lost answers, by the beginning of the reason in `failures`."""
    refit_bytes: int = 0
    """Bytes that ranks sent one another to give the engine the new weights."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Training problems left out because their prompt is too long, by environment."""
    ahead: bool = False
    """Whether generation runs ahead of training, so that its seconds are not counted."""
    rows: int | None = None
    """Rows of the data of supervised training; None if the run trains on sampled answers."""
    ranks: int = 1
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Mean over the ranks for each category in TIMED."""


@dataclass(frozen=True, slots=True)
class Metric:
    meaning: str
    value: Callable[[StepReport], Any] | None = None
    """Value in a step, None if it does not exist there. Left out if the metric is not computed from a step."""


def _of_answers(total: Callable[[StepStats], Number]) -> Callable[[StepReport], Any]:
    """Mean over the answers of a step."""
    return lambda step: total(step.stats) / step.stats.batch.answers


def _of_tokens(total: Callable[[LossStats], Number | None]) -> Callable[[StepReport], Any]:
    """Mean over the trained tokens of all updates of a step."""

    def mean(step: StepReport) -> Any:
        value = _if_trained(total)(step)
        return None if value is None or step.stats.loss is None else value / step.stats.loss.tokens

    return mean


def _if_trained(value: Callable[[LossStats], Number | None]) -> Callable[[StepReport], Any]:
    """Value of the loss statistics; None in steps without trained tokens."""
    return lambda step: value(step.stats.loss) if step.stats.loss is not None and step.stats.loss.tokens else None


def _of_devices(value: Callable[[DeviceStats], Number | None]) -> Callable[[StepReport], Any]:
    """Value of the device statistics; None for devices without them."""
    return lambda step: value(step.stats.device) if step.stats.device is not None else None


def _ratio(part: Number, whole: Number) -> Any:
    """The ratio; None if `whole` is 0."""
    return part / whole if whole else None


def _mfu(step: StepReport) -> Any:
    device, seconds = step.stats.device, step.seconds["train"]
    if device is None or not device.peak_flops or not seconds:
        return None
    return device.flops / (seconds * step.ranks * device.peak_flops)


def _reward_std(step: StepReport) -> float:
    batch = step.stats.batch
    mean = float(batch.reward / batch.answers)
    return math.sqrt(max(0.0, float(batch.reward_squared / batch.answers) - mean**2))


def _nonzero_groups(step: StepReport) -> Any:
    batch, loss = step.stats.batch, step.stats.loss
    return None if loss is not None and loss.teacher_kl is not None else batch.groups_with_signal / batch.groups


def _turns_mean(step: StepReport) -> Any:
    batch = step.stats.batch
    return batch.turns / batch.answers if batch.turns > batch.answers or batch.with_tools else None


def _branches_mean(step: StepReport) -> Any:
    batch = step.stats.batch
    return batch.sequences / batch.answers if batch.sequences > batch.answers else None


def _seconds(step: StepReport) -> float:
    return sum(step.seconds.values())


def _tokens(step: StepReport) -> Number:
    batch = step.stats.batch
    return batch.unpacked_tokens if step.rows else batch.answer_tokens


STEP_METRICS: dict[str, Metric] = {
    "answers": Metric("answers scored", lambda step: int(step.stats.batch.answers)),
    "mean_reward": Metric("mean reward of the step's answers, as scored", _of_answers(lambda s: s.batch.reward)),
    "right_ratio": Metric(
        "share of answers with reward 1, which evaluation counts as right", _of_answers(lambda s: s.batch.right)
    ),
    "reward_std": Metric("standard deviation of those rewards", _reward_std),
    "nonzero_groups_ratio": Metric(
        "share of groups whose rewards differ, the only ones with a gradient (absent with a teacher, which gives all "
        "groups one)",
        _nonzero_groups,
    ),
    "epoch": Metric(
        "passes over the rows of data at the end of the step (training.objective: supervised)",
        lambda step: step.next_ordinal / step.rows if step.rows else None,
    ),
    "loss": Metric(
        "loss, mean over the step's updates; with training.objective: supervised the mean of -log p of the learned "
        "tokens",
        lambda step: (step.stats.loss.loss if step.stats.loss else 0.0) / step.stats.update.updates,
    ),
    "grad_norm": Metric(
        "gradient norm before clipping, mean over the step's applied updates",
        lambda step: step.stats.update.grad_norm / step.stats.update.applied if step.stats.update.applied else None,
    ),
    "learning_rate": Metric("of the step's last update", lambda step: step.stats.update.learning_rate),
    "entropy": Metric(
        "mean entropy in nats of the distributions the trained tokens were drawn from, full vocabulary",
        _of_tokens(lambda loss: loss.entropy),
    ),
    "clip_fraction": Metric(
        "share of the trained tokens whose gradient a bound of the policy loss removed or, in cispo, reduced (absent "
        "for a loss without bounds)",
        _of_tokens(lambda loss: None if loss.clip_low is None else loss.clip_low + (loss.clip_high or 0.0)),
    ),
    "clip_fraction_low": Metric("... the lower bound", _of_tokens(lambda loss: loss.clip_low)),
    "clip_fraction_high": Metric("... the upper bound", _of_tokens(lambda loss: loss.clip_high)),
    "kl": Metric("mean KL estimate to the initial weights (kl_beta > 0)", _of_tokens(lambda loss: loss.kl)),
    "teacher_kl": Metric(
        "estimate of KL(policy || teacher) per token in nats: mean of log p(policy before the step) - log p(teacher) "
        "of the trained tokens (distill)",
        _of_tokens(lambda loss: loss.teacher_kl),
    ),
    "importance_ratio": Metric(
        "mean of exp(log_prob - old_log_prob) of the trained tokens", _of_tokens(lambda loss: loss.ratio)
    ),
    "importance_ratio_max": Metric("largest of them", _if_trained(lambda loss: loss.ratio_max)),
    "importance_weight": Metric(
        "mean importance weight (grpo.importance)", _of_tokens(lambda loss: loss.importance_weight)
    ),
    "inference_logprob_difference": Metric(
        "mean |training - engine log-prob| of the trained tokens", _of_tokens(lambda loss: loss.inference_difference)
    ),
    "inference_logprob_difference_max": Metric(
        "largest of them", _if_trained(lambda loss: loss.inference_difference_max)
    ),
    "nonfinite_tokens": Metric(
        "tokens left out of the loss because the policy's or the engine's log-prob is not finite (absent if there are "
        "none)",
        lambda step: (step.stats.loss.nonfinite or None) if step.stats.loss else None,
    ),
    "answer_length": Metric("mean tokens per answer", _of_answers(lambda s: s.batch.answer_tokens)),
    "answer_length_max": Metric("longest answer", lambda step: step.stats.batch.answer_length_max),
    "answer_length_min": Metric("shortest answer", lambda step: step.stats.batch.answer_length_min),
    "turns_mean": Metric(
        "mean turns of the model per answer (absent if all have one and no tools were offered)", _turns_mean
    ),
    "branches_mean": Metric(
        "mean sequences of tokens per answer, more than one where a program edits its conversation or has several "
        "(absent if all answers have one)",
        _branches_mean,
    ),
    "tool_calls_mean": Metric(
        "mean tool calls per answer that tools were offered to (absent without such answers)",
        lambda step: _ratio(step.stats.batch.tool_calls, step.stats.batch.with_tools),
    ),
    "prompt_length": Metric("mean tokens per prompt", _of_answers(lambda s: s.batch.prompt_tokens)),
    "truncated_ratio": Metric(
        "share of answers cut at sampling.max_new_tokens", _of_answers(lambda s: s.batch.truncated)
    ),
    "staleness_mean": Metric(
        "mean optimizer steps between the weights that sampled and those trained",
        _of_answers(lambda s: s.batch.staleness),
    ),
    "staleness_max": Metric("largest of them", lambda step: step.stats.batch.staleness_max),
    "failed_rollouts": Metric(
        "answers lost; reasons are in failed_rollouts_by_reason", lambda step: step.stats.batch.failed
    ),
    "failed_rollouts_by_reason": Metric(
        "answers lost, by reason (absent if there are none)", lambda step: dict(sorted(step.failures.items())) or None
    ),
    "skipped_updates": Metric(
        "updates of this step skipped for a non-finite gradient",
        lambda step: int(step.stats.update.updates - step.stats.update.applied),
    ),
    "packed_tokens_ratio": Metric(
        "packed tokens over those of the trajectories that are run: below 1 if prefixes are shared",
        lambda step: _ratio(step.stats.batch.packed_tokens, step.stats.batch.unpacked_tokens),
    ),
    "generation_rounds": Metric(
        "rounds of generation (dynamic sampling draws several)", lambda step: step.generation_rounds
    ),
    "first_ordinal": Metric("first prompt of the step in the prompt stream", lambda step: step.first_ordinal),
    "next_ordinal": Metric("first prompt of the next step", lambda step: step.next_ordinal),
    "curriculum_left_out": Metric(
        "problems that the curriculum has left out since the previous step (absent without a curriculum, as are the "
        "next two)"
    ),
    "curriculum_known": Metric("problems with a known pass rate"),
    "curriculum_pass_rate": Metric("mean of the recent pass rates of those problems"),
    "dropped_ordinals": Metric(
        "prompts settled without training, with the reason (absent if there are none)",
        lambda step: {str(ordinal): reason for ordinal, reason in step.dropped.items()} or None,
    ),
    "filtered_prompts": Metric(
        "training problems left out at the start because their prompts leave no room for an answer, by environment "
        "(absent if there are none)",
        lambda step: dict(step.left_out) or None,
    ),
    "overdue_tokens": Metric(
        "tokens of answers dropped as overdue (async.on_overdue; absent if there are none)",
        lambda step: step.stats.batch.overdue_tokens or None,
    ),
    "policy_version": Metric(
        "optimizer steps behind the weights at the end of the step", lambda step: step.policy_version
    ),
    "throughput/tokens_per_s": Metric(
        "generated tokens per second of the whole step; with training.objective: supervised all tokens of the rows",
        lambda step: _tokens(step) / _seconds(step),
    ),
    "throughput/tokens_per_s_per_rank": Metric(
        "... per rank", lambda step: _tokens(step) / _seconds(step) / step.ranks
    ),
    "throughput/generated_tokens_per_s": Metric(
        "generated tokens per second of generation; absent where it runs ahead of training (async.max_lag)",
        lambda step: None if step.ahead else _ratio(step.stats.batch.answer_tokens, step.seconds["generate"]),
    ),
    "throughput/mfu": Metric(
        "share of the GPUs' bf16 peak used by the training passes: operations that forward and backward of the tokens "
        "need (model/flops.py: no recomputation), per second of time/train_s; absent in fp32 and for GPUs of unknown "
        "peak",
        _mfu,
    ),
    "time/step_s": Metric(
        "seconds of the step without evaluation and saving; like all below the mean over the ranks", _seconds
    ),
    "time/generate_s": Metric(
        "seconds in generation; if it runs ahead of training, seconds waiting for the batch",
        lambda step: step.seconds["generate"],
    ),
    "time/reward_s": Metric(
        "seconds waiting for rewards while nothing was generated", lambda step: step.seconds["reward"]
    ),
    "time/log_probs_s": Metric("seconds scoring old and reference log-probs", lambda step: step.seconds["log-probs"]),
    "time/train_s": Metric("seconds in forward, backward and update", lambda step: step.seconds["train"]),
    "time/offload_s": Metric(
        "seconds moving Adam's state from host memory for the updates and back; absent if it stays on the device "
        "(placement.offload)",
        lambda step: step.seconds["offload"] if step.stats.update.offloaded else None,
    ),
    "time/refit_s": Metric(
        "seconds until the engine had the new weights; in a partitioned run only those that delayed the step",
        lambda step: step.seconds["refit"],
    ),
    "time/wait_s": Metric("seconds waiting for other ranks", lambda step: step.seconds["wait"]),
    "time/save_blocked_s": Metric("seconds that the newest published checkpoint stopped the training"),
    "time/save_s": Metric("seconds from the start of that save until it was published"),
    "system/failed_saves": Metric("checkpoints that could not be written"),
    "time/export_s": Metric("seconds of the newest export to Hugging Face's format, which runs beside the training"),
    "system/failed_exports": Metric("exports of checkpoints that failed; each is retried"),
    "system/refit_bytes": Metric(
        "bytes that ranks sent one another to give the engine the new weights; absent if it shares the trainer's",
        lambda step: step.refit_bytes or None,
    ),
    "system/replicas": Metric(
        "inference replicas that answer the first rank with the weights of the step; absent if the training ranks "
        "generate (placement.mode), as are the next eight"
    ),
    "system/slow_replicas": Metric("replicas that get no requests because they are far slower than the others"),
    "system/repeated_requests": Metric(
        "requests of the first driver since the previous step that another replica repeated because the first one was "
        "lost or slow"
    ),
    "system/replica_busy_mean": Metric(
        "share of the time since the previous step in which an inference replica computed, mean over the replicas "
        "present; updated every few seconds"
    ),
    "system/replica_running_mean": Metric(
        "answers that a replica generates at the end of the step, mean over replicas"
    ),
    "system/replica_waiting_mean": Metric("answers that wait in a replica at the end of the step, mean over replicas"),
    "system/replica_cache_used_mean": Metric(
        "share of a replica's cache of keys and values that is in use at the end of the step, mean over replicas"
    ),
    "system/replica_preemptions": Metric(
        "answers that lost their cache to others since the replicas started, and were computed again, sum over replicas"
    ),
    "time/publish_s": Metric(
        "seconds until the replicas sampled with the newest weights, most of them beside the training; the weights of "
        "the step itself may still be on their way"
    ),
    "time/probe_s": Metric(
        "seconds in which the ranks computed log-probs of a short text, which replicas or the server must report under "
        "the new weights; absent if the engine is not probed"
    ),
    "system/offloaded_bytes": Metric(
        "bytes of Adam's state that each update moves from host memory and back, over all ranks; absent if it stays on "
        "the device",
        lambda step: step.stats.update.offloaded or None,
    ),
    "system/peak_memory_gib": Metric(
        "GiB that torch's tensors held at once on a GPU since the previous step, maximum over the GPUs",
        _of_devices(lambda device: device.peak_memory / 2**30),
    ),
    "system/power_w": Metric(
        "watts of a GPU at the end of training, mean over the GPUs; absent without NVML",
        _of_devices(lambda device: device.power / device.powers if device.powers else None),
    ),
}


@dataclass(frozen=True, slots=True)
class EnvironmentMetric:
    """A metric environments/ID/NAME, written for each environment of a run with several."""

    meaning: str
    value: Callable[[EnvironmentStats], Any]
    """Value in a step, None if it does not exist there."""


ENVIRONMENT_METRICS: dict[str, EnvironmentMetric] = {
    "groups": EnvironmentMetric("prompts of the step from the environment", lambda its: its.groups),
    "mean_reward": EnvironmentMetric("mean reward of their answers", lambda its: _ratio(its.reward, its.answers)),
    "nonzero_groups_ratio": EnvironmentMetric(
        "share of its groups whose rewards differ", lambda its: _ratio(its.groups_with_signal, its.groups)
    ),
    "failed_rollouts": EnvironmentMetric("answers lost", lambda its: its.failed),
}


OF_SAMPLED_ANSWERS = frozenset(
    (
        *("answers", "mean_reward", "right_ratio", "reward_std", "nonzero_groups_ratio", "truncated_ratio"),
        *("clip_fraction", "clip_fraction_low", "clip_fraction_high", "importance_ratio", "importance_ratio_max"),
        *("inference_logprob_difference", "inference_logprob_difference_max", "staleness_mean", "staleness_max"),
        *("failed_rollouts", "generation_rounds", "throughput/generated_tokens_per_s", "time/reward_s"),
    )
)
"""Metrics that supervised training does not have. Its answers are the learned parts of the rows."""

COMPONENTS = "reward/"
"""Prefix of metrics of reward components, each the mean over the answers that have the component."""


def metrics_of(step: StepReport) -> dict[str, Any]:
    """Return the values of a step's line in metrics.jsonl."""
    absent = OF_SAMPLED_ANSWERS if step.rows else ()
    values = {name: each.value(step) for name, each in STEP_METRICS.items() if each.value and name not in absent}
    values |= {f"{COMPONENTS}{name}": total / answers for name, (total, answers) in sorted(step.components.items())}
    for id, stats in step.stats.environments.items():
        values |= {f"environments/{id}/{name}": metric.value(stats) for name, metric in ENVIRONMENT_METRICS.items()}
    return {name: value for name, value in values.items() if value is not None}


def check_name(name: str) -> None:
    """Raise ValueError for a metric that is not registered."""
    of_environment = name.startswith("environments/") and name.rpartition("/")[2] in ENVIRONMENT_METRICS
    if name not in STEP_METRICS and not name.startswith(("eval/", COMPONENTS)) and not of_environment:
        raise ValueError(f"metric {name!r} is not registered in megatron_rl/metrics/names.py")
