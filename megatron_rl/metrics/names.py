"""Every metric a run writes, by name, with its meaning and formula: the one registry behind console, TensorBoard and
metrics.jsonl.

Names under time/ throughput/ system/ may differ between two runs of the same recipe; all others are reproducible.
A value that does not exist in a step is absent from its line, never NaN.

Without kl_beta and entropy_coefficient an answer whose advantage is 0 has no gradient and is not run. *Trained tokens*
are those of answers that are: in a group whose rewards are all equal there are none. The loss is the mean over all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.metrics.stats import DeviceStats, EnvironmentStats, LossStats, Number, StepStats

TIMED = ("generate", "reward", "log-probs", "train", "offload", "refit", "wait")
"""Categories of the timeline that belong to a step; what happens between two steps is not among them."""

PROMPT_TOO_LONG = "prompt too long"
OVERDUE_ANSWERS = "overdue"
"""Why an ordinal is dropped, in `dropped_ordinals`."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one rank has to say of a step, or all of them together: then its metrics are made of it. All but `stats`,
    `dropped`, `failures` and `components` is the same on every rank."""

    step: int
    stats: StepStats
    generation_rounds: int
    first_ordinal: int
    next_ordinal: int
    policy_version: int
    """At the end of the step."""
    dropped: Mapping[int, str]
    """Ordinals settled without training, and why; of all ranks in their order."""
    failures: Mapping[str, int]
    """Answers lost, by reason."""
    components: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Sum of each component of the rewards, and the number of answers that have it."""
    tracebacks: Mapping[str, str] = field(default_factory=dict)
    """Places where the task's code raised errors that cost answers, by what those reasons begin with."""
    refit_bytes: int = 0
    """That ranks sent one another until the engine had the new weights."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Training problems whose prompt is too long, by environment."""
    ahead: bool = False
    """Whether generation runs ahead of training, and so has no seconds of its own."""
    ranks: int = 1
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of all ranks: of each category in TIMED, the mean over them."""


@dataclass(frozen=True, slots=True)
class Metric:
    meaning: str
    value: Callable[[StepReport], Any] | None = None
    """Of one step; None where it does not exist in it. Left out where the metric is not made of a step."""


def _of_answers(total: Callable[[StepStats], Number]) -> Callable[[StepReport], Any]:
    """Mean over the answers."""
    return lambda step: total(step.stats) / step.stats.batch.answers


def _of_tokens(total: Callable[[LossStats], Number | None]) -> Callable[[StepReport], Any]:
    """Mean over the trained tokens of all updates."""

    def mean(step: StepReport) -> Any:
        value = _if_trained(total)(step)
        return None if value is None or step.stats.loss is None else value / step.stats.loss.tokens

    return mean


def _if_trained(value: Callable[[LossStats], Number | None]) -> Callable[[StepReport], Any]:
    """A value of the loss in steps that trained on any token; None in others."""
    return lambda step: value(step.stats.loss) if step.stats.loss is not None and step.stats.loss.tokens else None


def _of_devices(value: Callable[[DeviceStats], Number | None]) -> Callable[[StepReport], Any]:
    """A value of the devices; None where they do not say."""
    return lambda step: value(step.stats.device) if step.stats.device is not None else None


def _ratio(part: Number, whole: Number) -> Any:
    """None where there is nothing that it would be of."""
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


def _turns_mean(step: StepReport) -> Any:
    batch = step.stats.batch
    return batch.turns / batch.answers if batch.turns > batch.answers or batch.with_tools else None


def _seconds(step: StepReport) -> float:
    return sum(step.seconds.values())


STEP_METRICS: dict[str, Metric] = {
    "answers": Metric("answers scored", lambda step: int(step.stats.batch.answers)),
    "mean_reward": Metric("mean reward of the step's answers, as scored", _of_answers(lambda s: s.batch.reward)),
    "right_ratio": Metric(
        "share of the answers whose reward is 1, as evaluation counts right ones", _of_answers(lambda s: s.batch.right)
    ),
    "reward_std": Metric("standard deviation of those rewards", _reward_std),
    "nonzero_groups_ratio": Metric(
        "share of groups whose rewards differ, the only ones with a gradient",
        lambda step: step.stats.batch.groups_with_signal / step.stats.batch.groups,
    ),
    "loss": Metric(
        "GRPO loss, mean over the step's updates",
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
        "share of the trained tokens whose gradient the clip removed",
        _of_tokens(lambda loss: loss.clip_low + loss.clip_high),
    ),
    "clip_fraction_low": Metric("... by the lower clip", _of_tokens(lambda loss: loss.clip_low)),
    "clip_fraction_high": Metric("... by the upper clip", _of_tokens(lambda loss: loss.clip_high)),
    "kl": Metric("mean KL estimate to the initial weights (kl_beta > 0)", _of_tokens(lambda loss: loss.kl)),
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
        "tokens left out of the loss because a log-prob of theirs, the policy's or the engine's, is not finite (absent "
        "where none is)",
        lambda step: (step.stats.loss.nonfinite or None) if step.stats.loss else None,
    ),
    "answer_length": Metric("mean tokens per answer", _of_answers(lambda s: s.batch.answer_tokens)),
    "answer_length_max": Metric("longest answer", lambda step: step.stats.batch.answer_length_max),
    "answer_length_min": Metric("shortest answer", lambda step: step.stats.batch.answer_length_min),
    "turns_mean": Metric(
        "mean turns of the model per answer (absent where all have one and no tools were offered)", _turns_mean
    ),
    "tool_calls_mean": Metric(
        "mean calls of tools per answer that tools were offered to (absent where there is none)",
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
        "answers lost, by reason (absent where none is)", lambda step: dict(sorted(step.failures.items())) or None
    ),
    "skipped_updates": Metric(
        "updates of this step skipped for a non-finite gradient",
        lambda step: int(step.stats.update.updates - step.stats.update.applied),
    ),
    "packed_tokens_ratio": Metric(
        "packed tokens over those of the trajectories that are run: below 1 where beginnings are shared",
        lambda step: _ratio(step.stats.batch.packed_tokens, step.stats.batch.unpacked_tokens),
    ),
    "generation_rounds": Metric(
        "rounds of generation (dynamic sampling draws several)", lambda step: step.generation_rounds
    ),
    "first_ordinal": Metric("first prompt of the step in the prompt stream", lambda step: step.first_ordinal),
    "next_ordinal": Metric("first prompt of the next step", lambda step: step.next_ordinal),
    "dropped_ordinals": Metric(
        "prompts settled without training, with the reason (absent where none is)",
        lambda step: {str(ordinal): reason for ordinal, reason in step.dropped.items()} or None,
    ),
    "filtered_prompts": Metric(
        "training problems left out at the start, by environment: their prompts leave no room for an answer (absent "
        "where none is)",
        lambda step: dict(step.left_out) or None,
    ),
    "overdue_tokens": Metric(
        "tokens of the answers that were dropped as overdue (async.on_overdue; absent where none was)",
        lambda step: step.stats.batch.overdue_tokens or None,
    ),
    "policy_version": Metric(
        "optimizer steps behind the weights at the end of the step", lambda step: step.policy_version
    ),
    "throughput/tokens_per_s": Metric(
        "generated tokens per second of the whole step", lambda step: step.stats.batch.answer_tokens / _seconds(step)
    ),
    "throughput/tokens_per_s_per_rank": Metric(
        "... per rank", lambda step: step.stats.batch.answer_tokens / _seconds(step) / step.ranks
    ),
    "throughput/generated_tokens_per_s": Metric(
        "generated tokens per second of generation; absent where it runs ahead of training (async.max_lag)",
        lambda step: None if step.ahead else _ratio(step.stats.batch.answer_tokens, step.seconds["generate"]),
    ),
    "throughput/mfu": Metric(
        "share of the GPUs' bf16 peak that the training passes used: operations that forward and backward of their "
        "tokens need (model/flops.py: no recomputation), per second of time/train_s; absent in fp32 and for GPUs whose "
        "peak is not known",
        _mfu,
    ),
    "time/step_s": Metric(
        "seconds of the whole step, evaluation and saving aside; like all below the mean over the ranks", _seconds
    ),
    "time/generate_s": Metric(
        "seconds in generation; where it runs ahead of training, those in which the batch was waited for",
        lambda step: step.seconds["generate"],
    ),
    "time/reward_s": Metric(
        "seconds in which rewards were waited for and nothing was generated", lambda step: step.seconds["reward"]
    ),
    "time/log_probs_s": Metric("seconds scoring old and reference log-probs", lambda step: step.seconds["log-probs"]),
    "time/train_s": Metric("seconds in forward, backward and update", lambda step: step.seconds["train"]),
    "time/offload_s": Metric(
        "seconds in which Adam's state came from the hosts' memory for the updates and went back; absent where it "
        "stays on the device (placement.offload)",
        lambda step: step.seconds["offload"] if step.stats.update.offloaded else None,
    ),
    "time/refit_s": Metric(
        "seconds until the engine had the new weights; in a partitioned run those in which nothing else was done",
        lambda step: step.seconds["refit"],
    ),
    "time/wait_s": Metric("seconds waiting for other ranks", lambda step: step.seconds["wait"]),
    "time/save_blocked_s": Metric("seconds training stood still for the newest published checkpoint"),
    "time/save_s": Metric("seconds from its begin until it was published"),
    "system/failed_saves": Metric("checkpoints that could not be written"),
    "time/export_s": Metric("seconds that the newest export to Hugging Face's format took, beside the training"),
    "system/failed_exports": Metric("exports of checkpoints that failed; each is tried again"),
    "system/refit_bytes": Metric(
        "bytes that ranks sent one another until the engine had the new weights; absent where it has the trainer's",
        lambda step: step.refit_bytes or None,
    ),
    "system/replicas": Metric(
        "inference replicas that answer the first rank by the weights of the step; absent where the ranks that train "
        "generate (placement.mode), as are the next four"
    ),
    "system/slow_replicas": Metric("those of them that are far slower than the others, and asked nothing for that"),
    "system/repeated_requests": Metric(
        "requests of the first driver since the step before that were asked again elsewhere, because their replica was "
        "lost or slow"
    ),
    "system/replica_busy_mean": Metric(
        "share of the time since the step before for which an inference replica computed, mean over those that were "
        "there; news of them come every few seconds"
    ),
    "time/publish_s": Metric(
        "seconds that the newest weights took until the replicas sampled by them, most of them beside the training; "
        "those of the step may still be on their way"
    ),
    "system/offloaded_bytes": Metric(
        "bytes of Adam's state in the hosts' memory, of all ranks together, which each update brings and takes away; "
        "absent where it stays on the device",
        lambda step: step.stats.update.offloaded or None,
    ),
    "system/peak_memory_gib": Metric(
        "GiB that torch's tensors held at once on a GPU since the step before, the most of all GPUs",
        _of_devices(lambda device: device.peak_memory / 2**30),
    ),
    "system/power_w": Metric(
        "watts that a GPU draws at the end of training, mean over the GPUs; absent where NVML does not say",
        _of_devices(lambda device: device.power / device.powers if device.powers else None),
    ),
}


@dataclass(frozen=True, slots=True)
class EnvironmentMetric:
    """A metric environments/ID/NAME, written for each environment where several are trained on at once."""

    meaning: str
    value: Callable[[EnvironmentStats], Any]
    """None where it does not exist in a step."""


ENVIRONMENT_METRICS: dict[str, EnvironmentMetric] = {
    "groups": EnvironmentMetric("prompts of the step that are its", lambda its: its.groups),
    "mean_reward": EnvironmentMetric("mean reward of their answers", lambda its: _ratio(its.reward, its.answers)),
    "nonzero_groups_ratio": EnvironmentMetric(
        "share of its groups whose rewards differ", lambda its: _ratio(its.groups_with_signal, its.groups)
    ),
    "failed_rollouts": EnvironmentMetric("answers lost", lambda its: its.failed),
}


COMPONENTS = "reward/"
"""Prefix of the metric of a component of the rewards: its mean over the answers that have it."""


def metrics_of(step: StepReport) -> dict[str, Any]:
    """What a step's line of metrics.jsonl says."""
    values = {name: metric.value(step) for name, metric in STEP_METRICS.items() if metric.value}
    values |= {f"{COMPONENTS}{name}": total / answers for name, (total, answers) in sorted(step.components.items())}
    for id, stats in step.stats.environments.items():
        values |= {f"environments/{id}/{name}": metric.value(stats) for name, metric in ENVIRONMENT_METRICS.items()}
    return {name: value for name, value in values.items() if value is not None}


def check_name(name: str) -> None:
    """Raises ValueError for a metric that is not in the registry."""
    of_environment = name.startswith("environments/") and name.rpartition("/")[2] in ENVIRONMENT_METRICS
    if name not in STEP_METRICS and not name.startswith(("eval/", COMPONENTS)) and not of_environment:
        raise ValueError(f"metric {name!r} is not registered in megatron_rl/metrics/names.py")
