"""One step's metrics: what the ranks tallied, turned into the numbers of one line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron_rl.contract.attempt_records import TimelineLine
from megatron_rl.metrics.tally import Tally
from megatron_rl.metrics.timeline import Timeline
from megatron_rl.rank.groups import Groups
from megatron_rl.rollout.driver import RolloutBatch
from megatron_rl.training.optimizer import Update

OF_A_STEP = ("generate", "reward", "log-probs", "train", "refit", "wait")
"""Categories of time/; what happens between two steps is not among them."""


class AllAnswersLost(RuntimeError):
    """Nothing of a step could be scored: the environment is broken, and going on would train on nothing."""


class StepReport:
    """What one step was, on one rank and then on all."""

    def __init__(self, step: int, timeline: Timeline) -> None:
        self.step = step
        self.tally = Tally()
        self.timeline = timeline

    def metrics(
        self,
        batch: RolloutBatch,
        updates: Sequence[Update],
        policy_version: int,
        groups: Groups,
    ) -> tuple[dict[str, Any], TimelineLine]:
        """The step's lines for metrics.jsonl and for the attempt's timeline, the same on every rank. Collective.

        Raises AllAnswersLost.
        """
        self.timeline.tally(self.tally)
        total = self.tally.reduce(groups.control)
        if not total["answers"]:
            raise AllAnswersLost(f"no answer of step {self.step} could be scored: {failures_by_reason(batch, groups)}")
        ranks = dist.get_world_size(groups.control)
        line = self.timeline.line(total, ranks, self.step)
        spent = {name: line.seconds.get(name, 0.0) / ranks for name in OF_A_STEP}
        seconds = sum(spent.values())
        metrics: dict[str, Any] = {
            **rollout_metrics(total),
            **update_metrics(total, updates),
            "generation_rounds": batch.rounds,
            "first_ordinal": batch.first_ordinal,
            "next_ordinal": batch.next_ordinal,
            "policy_version": policy_version,
            "throughput/tokens_per_s": total["answer_tokens"] / seconds,
            "throughput/tokens_per_s_per_rank": total["answer_tokens"] / seconds / ranks,
            "throughput/generated_tokens_per_s": total["answer_tokens"] / spent["generate"],
            "time/step_s": seconds,
            **{f"time/{name.replace('-', '_')}_s": value for name, value in spent.items()},
        }
        if batch.dropped:
            metrics["dropped_ordinals"] = {str(ordinal): reason for ordinal, reason in sorted(batch.dropped.items())}
        if total["failed"]:
            metrics["failed_rollouts_by_reason"] = failures_by_reason(batch, groups)
        return metrics, line


def rollout_metrics(total: Mapping[str, float]) -> dict[str, float]:
    """What the answers looked like, from the reduced tally of `Trainer.train`."""
    answers = total["answers"]
    mean = total["reward"] / answers
    return {
        "mean_reward": mean,
        "reward_std": math.sqrt(max(0.0, total["reward_squared"] / answers - mean**2)),
        "nonzero_groups_ratio": total["signal"] / total["groups"],
        "answer_length": total["answer_tokens"] / answers,
        "answer_length_max": total["answer_length_max"],
        "answer_length_min": total["answer_length_min"],
        "prompt_length": total["prompt_tokens"] / answers,
        "truncated_ratio": total["truncated"] / answers,
        "staleness": total["staleness"] / answers,
        "staleness_max": total["staleness_max"],
        "failed_rollouts": total["failed"],
        "packed_tokens_ratio": total["packed_tokens"] / (total["prompt_tokens"] + total["answer_tokens"]),
    }


def update_metrics(total: Mapping[str, float], updates: Sequence[Update]) -> dict[str, float]:
    """What the updates did; means are over the trained tokens of all updates."""
    applied = [update for update in updates if update.applied]
    metrics: dict[str, float] = {
        "loss": total["loss"] / len(updates),
        "learning_rate": updates[-1].learning_rate,
        "skipped_updates": len(updates) - len(applied),
    }
    if applied:
        metrics["grad_norm"] = sum(update.grad_norm for update in applied) / len(applied)
    tokens = total["sum/tokens"]
    if not tokens:
        return metrics
    metrics |= {
        "entropy": total["entropy"] / tokens,
        "clip_fraction": (total["sum/clip_low"] + total["sum/clip_high"]) / tokens,
        "clip_fraction_low": total["sum/clip_low"] / tokens,
        "clip_fraction_high": total["sum/clip_high"] / tokens,
        "importance_ratio": total["sum/ratio"] / tokens,
        "importance_ratio_max": total["max/ratio"],
        "inference_logprob_difference": total["sum/inference_difference"] / tokens,
        "inference_logprob_difference_max": total["max/inference_difference"],
    }
    for name in ("kl", "importance_weight"):
        if f"sum/{name}" in total:
            metrics[name] = total[f"sum/{name}"] / tokens
    return metrics


def failures_by_reason(batch: RolloutBatch, groups: Groups) -> dict[str, int]:
    """Answers lost on all ranks, by reason. Collective; called only when there are any."""
    mine: Counter[str] = Counter()
    for rollout_group in batch.groups:
        mine.update(rollout_group.failures)
    everyone: list[Any] = [None] * dist.get_world_size(groups.control)
    dist.all_gather_object(everyone, dict(mine), group=groups.control)
    total: Counter[str] = Counter()
    for counts in everyone:
        total.update(counts)
    return dict(sorted(total.items()))
