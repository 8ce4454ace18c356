"""What is counted in a step, typed from where it arises to the record: every field says how it adds up over
micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from megatron_rl.metrics.tally import Reduction, Tally

Number = float | Tensor
"""A tensor is a scalar without gradient, on any device; reduced numbers are floats."""
Total = Annotated[Number, Reduction.SUM]
Largest = Annotated[Number, Reduction.MAX]
Smallest = Annotated[Number, Reduction.MIN]
Stats = TypeVar("Stats")


@dataclass(frozen=True, slots=True)
class BatchStats:
    """What the trajectories of a batch look like, before training on them."""

    answers: Total
    groups: Total
    groups_with_signal: Total
    reward: Total
    """As scored, summed over answers."""
    reward_squared: Total
    right: Total
    """Answers with reward 1, as evaluation counts them."""
    answer_tokens: Total
    """That the model sampled."""
    answer_length_max: Largest
    answer_length_min: Smallest
    prompt_tokens: Total
    packed_tokens: Total
    """Tokens of all micro-batches of one pass."""
    unpacked_tokens: Total
    """Tokens of the trajectories in them, were nothing shared."""
    turns: Total
    """Of the model, in all answers."""
    tool_calls: Total
    with_tools: Total
    """Answers that tools were offered to."""
    with_components: Total
    """Answers whose reward has components."""
    truncated: Total
    """Answers cut at the limit of new tokens."""
    failed: Total
    """Answers lost."""
    dropped: Total
    """Ordinals settled without training."""
    overdue_tokens: Total
    """Of the answers to those that were dropped before they were finished."""
    staleness: Total
    """Optimizer steps between the oldest weights that sampled a trained token of an answer and those trained, summed
    over answers."""
    staleness_max: Largest


@dataclass(frozen=True, slots=True)
class EnvironmentStats:
    """The part of a batch that is of one environment, where there are several."""

    answers: Total
    groups: Total
    groups_with_signal: Total
    reward: Total
    """As scored, summed over answers."""
    failed: Total
    """Answers lost."""


@dataclass(frozen=True, slots=True)
class LossStats:
    """The loss, and what it saw of the tokens that it trained on: those whose weight is not 0 and whose log-probs are
    finite."""

    loss: Total
    tokens: Total
    nonfinite: Total
    """Tokens with a weight that were left out, because a log-prob of theirs is not finite."""
    entropy: Total
    """In nats, of the distributions that the tokens were drawn from."""
    ratio: Total
    """exp(logprobs - old_logprobs)"""
    ratio_max: Largest
    clip_low: Total
    """Tokens whose gradient the lower clip removed."""
    clip_high: Total
    inference_difference: Total
    """|old - inference log-prob|"""
    inference_difference_max: Largest
    kl: Total | None
    """The penalty, before kl_beta; with kl_beta alone."""
    importance_weight: Total | None
    """With grpo.importance alone."""


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """What the updates of a step did: but for `offloaded` the same on every rank."""

    updates: Largest
    applied: Largest
    grad_norm: Largest
    """Before clipping, summed over the applied updates."""
    learning_rate: Largest
    """Of the last update."""
    offloaded: Total
    """Bytes of Adam's state that went from the host's memory to the device and back with each of them."""


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """What a step took of the devices."""

    peak_memory: Largest
    """Bytes of torch's tensors."""
    power: Total
    """Watts, summed over the devices that say."""
    powers: Total
    """Devices that say."""
    flops: Total
    """Floating-point operations that the training passes need by formula, where the devices' peak is known."""
    peak_flops: Smallest
    """Operations per second that a device can do; 0 where that is not known of one."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one rank counted in a step, or all of them."""

    batch: BatchStats
    loss: LossStats | None
    """None where no rank had anything to train on."""
    update: UpdateStats
    device: DeviceStats | None
    """None where devices do not say what they are used for."""
    environments: Mapping[str, EnvironmentStats] = field(default_factory=dict)
    """By id, of all that are trained on, the same ones on every rank; empty where there is only one."""

    def put(self, tally: Tally) -> None:
        """Add all of it to what is reduced over the ranks."""
        for block, stats in self._blocks():
            kind: Any = type(stats)
            for name, reduction in reductions(kind).items():
                if (value := getattr(stats, name)) is not None:
                    tally.put(f"{block}.{name}", reduction, value)

    def reduced(self, total: Mapping[str, float]) -> StepStats:
        """The same over all ranks, from their reduced tally."""
        blocks: dict[str, Any] = {"loss": None, "device": None}
        for block, stats in self._blocks():
            kind: Any = type(stats)
            blocks[block] = kind(**{name: total.get(f"{block}.{name}") for name in reductions(kind)})
        environments = {id: blocks.pop(f"environments/{id}") for id in self.environments}
        return StepStats(**blocks, environments=environments)

    def _blocks(self) -> Iterator[tuple[str, BatchStats | EnvironmentStats | LossStats | UpdateStats | DeviceStats]]:
        yield "batch", self.batch
        if self.loss is not None:
            yield "loss", self.loss
        yield "update", self.update
        if self.device is not None:
            yield "device", self.device
        for id, stats in self.environments.items():
            yield f"environments/{id}", stats


NEUTRAL = {Reduction.SUM: 0.0, Reduction.MAX: -math.inf, Reduction.MIN: math.inf}


def uncounted(kind: Callable[..., Stats], *absent: str) -> Stats:
    """Statistics that change nothing where they are reduced with others: of a rank that has none to count, for what it
    has seen is counted by another.

    absent: fields that the other ranks do not have either.
    """
    return kind(**{name: None if name in absent else NEUTRAL[of] for name, of in reductions(kind).items()})


def combined(parts: Sequence[LossStats]) -> LossStats:
    """The statistics of several micro-batches, at least one, as one."""
    if len(parts) == 1:
        return parts[0]
    whole: dict[str, Any] = {}
    for name, reduction in reductions(LossStats).items():
        values = [getattr(part, name) for part in parts]
        whole[name] = None if values[0] is None else _over(reduction, torch.stack(values))
    return LossStats(**whole)


def _over(reduction: Reduction, values: Tensor) -> Tensor:
    match reduction:
        case Reduction.SUM:
            return values.sum()
        case Reduction.MAX:
            return values.amax()
        case Reduction.MIN:
            return values.amin()


@cache
def reductions(kind: Any) -> dict[str, Reduction]:
    """How each field of a class of statistics adds up."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: next(part for part in _parts(hint) if isinstance(part, Reduction)) for name, hint in hints.items()}


def _parts(hint: Any) -> Iterator[Any]:
    """What a type hint is made of, all the way down."""
    yield hint
    for part in (*get_args(hint), *getattr(hint, "__metadata__", ())):
        yield from _parts(part)
