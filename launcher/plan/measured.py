"""Lengths and speeds from the record of a run, to be used instead of estimates."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from launcher.errors import BadInput
from launcher.plan.lengths import Lognormal
from launcher.recipe.load import read_resolved
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, read_lines
from megatron_rl.recipe.config import RunConfig

RECENT = 50
"""Number of newest steps that are averaged. The first step of a run is left out: it compiles kernels."""
OTHER = ("time/reward_s", "time/log_probs_s", "time/offload_s")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    run: str
    config: RunConfig
    steps: int
    lengths: Lognormal
    prompt_tokens: int
    step_s: float
    generate_s: float
    train_s: float
    refit_s: float
    """Seconds to send new weights to the inference replicas."""
    other_s: float
    max_lag: int
    """Largest staleness of an answer, in versions."""


def read_measured(run: RunDir) -> MeasuredRun:
    """Average the newest steps of a run.

    Raises:
        BadInput: the run has made fewer than two steps, or its files cannot be read.
    """
    name, config, found = run.root.name, read_resolved(run.resolved), read_lines(MetricsLine, run.metrics)
    if isinstance(found, Unreadable):
        raise BadInput(str(found))
    lines = [line.values for line in found.records[1:]][-RECENT:]
    if not lines:
        raise BadInput(f"{run.metrics}: {name} has not made two steps yet, so there is nothing to measure")

    def mean(metric: str, default: float | None = None) -> float:
        values = [float(line[metric]) for line in lines if metric in line]
        if not values and default is None:
            raise BadInput(f"{run.metrics}: no step has the metric {metric}")
        return fmean(values) if values else default or 0.0

    step_s, busy = mean("time/step_s"), mean("system/replica_busy_mean", 0.0)
    lengths = Lognormal.fitted(
        mean=mean("answer_length"),
        largest=mean("answer_length_max"),
        cut=mean("truncated_ratio", 0.0),
        answers=config.grpo.prompts_per_step * config.grpo.group_size,
        maximum=config.sampling.max_new_tokens,
    )
    return MeasuredRun(
        run=name,
        config=config,
        steps=len(lines),
        lengths=lengths,
        prompt_tokens=max(1, round(mean("prompt_length"))),
        step_s=step_s,
        generate_s=busy * step_s or mean("time/generate_s"),
        train_s=mean("time/train_s"),
        refit_s=mean("time/publish_s", mean("time/refit_s", 0.0)),
        other_s=sum(mean(part, 0.0) for part in OTHER),
        max_lag=max(int(line.get("staleness_max", 0)) for line in lines),
    )
