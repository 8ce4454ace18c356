"""A metric: its meaning, unit, good range, advice and formula; and the counts of a step that formulas read.

Without torch at run time, so that the launcher can describe metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.rank.metrics.stats import DeviceStats, LossStats, Number, StepStats


@dataclass(frozen=True, slots=True)
class StepReport:
    """Counts of a step, of one rank or of all ranks; metrics are made of the latter. Only `stats`, `dropped`,
    `failures` and `components` differ between ranks."""

    step: int
    stats: StepStats
    generation_rounds: int
    first_ordinal: int
    next_ordinal: int
    policy_version: int  # at the end of the step
    dropped: Mapping[int, str]  # ordinals settled without training, each with the reason
    failures: Mapping[str, int]  # answers lost, by reason
    components: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Sum of each component of the rewards, and the number of answers that have it."""
    tracebacks: Mapping[str, str] = field(default_factory=dict)
    """Tracebacks of errors in the task's code that lost answers, by the beginning of the reason in `failures`."""
    refit_bytes: int = 0  # bytes that ranks sent one another to give the engine the new weights
    left_out: Mapping[str, int] = field(default_factory=dict)  # prompts too long, by environment
    ahead: bool = False  # whether generation runs ahead of training, so that its seconds are not counted
    rows: int | None = None  # rows of the data of supervised training; None if the run trains on sampled answers
    passes: Mapping[str, float] = field(default_factory=dict)  # passes over each of several sets of rows, by its id
    ranks: int = 1
    seconds: Mapping[str, float] = field(default_factory=dict)  # mean over the ranks for each category in TIMED


@dataclass(frozen=True, slots=True)
class Metric:
    meaning: str
    value: Callable[[StepReport], Any] | None = None
    """Value in a step, None if it does not exist there. Left out if the metric is not computed from a step."""
    unit: str = ""  # unit for people, such as `nats`; empty for a plain number
    good: str = ""  # range or behaviour of a run that learns well; empty if every value is fine
    advice: str = ""
    """Remedies for values outside of `good`, beside those of the rules about the metric (contract/learning.py)."""


def of_answers(total: Callable[[StepStats], Number]) -> Callable[[StepReport], Any]:
    """Mean over the answers of a step."""
    return lambda step: total(step.stats) / step.stats.batch.answers


def of_tokens(total: Callable[[LossStats], Number | None]) -> Callable[[StepReport], Any]:
    """Mean over the trained tokens of all updates of a step."""

    def mean(step: StepReport) -> Any:
        value = if_trained(total)(step)
        return None if value is None or step.stats.loss is None else value / step.stats.loss.tokens

    return mean


def if_trained(value: Callable[[LossStats], Number | None]) -> Callable[[StepReport], Any]:
    """Value of the loss statistics; None in steps without trained tokens."""
    return lambda step: value(step.stats.loss) if step.stats.loss is not None and step.stats.loss.tokens else None


def of_devices(value: Callable[[DeviceStats], Number | None]) -> Callable[[StepReport], Any]:
    """Value of the device statistics; None for devices without them."""
    return lambda step: value(step.stats.device) if step.stats.device is not None else None


def ratio(part: Number, whole: Number) -> Any:
    """The ratio; None if `whole` is 0."""
    return part / whole if whole else None
