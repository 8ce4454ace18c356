"""Statistics of a step. Every field declares how it is reduced over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from megatron_rl.rank.control import Control


class Reduction(Enum):
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Reduced:
    """A tally over all ranks. All but `compared` is the same on each."""

    total: Mapping[str, float]  # name -> value over all ranks
    ranks: int
    compared: Mapping[str, Tensor] | None = None
    """Name -> [ranks] values of the ranks, fp64, for those that were put with `compare`. None except on rank 0."""


class Tally:
    """Named scalars. Every rank must put the same names in the same order."""

    def __init__(self) -> None:
        self._values: dict[str, float | Tensor] = {}
        self._reductions: dict[str, Reduction] = {}
        self._compared: dict[str, float] = {}

    def put(self, name: str, reduction: Reduction, value: float | Tensor) -> None:
        self._values[name] = value
        self._reductions[name] = reduction

    def add(self, name: str, value: float | Tensor) -> None:
        """Put a value that is summed over the ranks."""
        self.put(name, Reduction.SUM, value)

    def compare(self, name: str, value: float) -> None:
        """Put a value that is compared between the ranks."""
        self._compared[name] = value

    # The order of a sum matters: 1e16 + 1 - 1e16 is 0, and 1e16 - 1e16 + 1 is 1. Here it depends on the number of ranks
    # alone, and all ranks get the same bits: up to eight are added in their order, more by parts of the tree.
    def reduce(self, control: Control) -> Reduced:
        """Return the values over all ranks, in fp64. One message."""
        own = torch.tensor(self._floats(), dtype=torch.float64)
        row = torch.tensor([*self._compared.values()], dtype=torch.float64)
        whole, rows = control.reduce_and_list(own, self._combined, row)
        compared = None if rows is None else dict(zip(self._compared, rows.T, strict=True))
        return Reduced(dict(zip(self._values, whole.tolist(), strict=True)), control.size, compared)

    def _combined(self, rows: Tensor) -> Tensor:
        of_all = {reduction: reduce(rows, 0) for reduction, reduce in REDUCE.items()}
        return torch.stack([of_all[reduction][place] for place, reduction in enumerate(self._reductions.values())])

    def _floats(self) -> list[float]:
        """Values on the host. Tensors of a device come in a single transfer."""
        tensors = [value for value in self._values.values() if isinstance(value, Tensor)]
        on_host = iter(torch.stack(tensors).tolist() if tensors else [])
        return [next(on_host) if isinstance(value, Tensor) else float(value) for value in self._values.values()]


Number = float | Tensor  # a float, or a scalar tensor without gradient on any device. Reduced numbers are floats
Total = Annotated[Number, Reduction.SUM]
Largest = Annotated[Number, Reduction.MAX]
Smallest = Annotated[Number, Reduction.MIN]
Stats = TypeVar("Stats")


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Statistics of the trajectories of a batch before training on them."""

    answers: Total
    groups: Total
    groups_with_signal: Total
    reward: Total  # sum over answers of the reward as scored
    reward_squared: Total
    right: Total  # answers with accuracy 1, which evaluation counts as right
    answer_tokens: Total  # tokens that the model sampled
    answer_length_max: Largest
    answer_length_min: Smallest
    prompt_tokens: Total
    packed_tokens: Total  # tokens of all micro-batches of one pass
    unpacked_tokens: Total  # tokens of the same trajectories without sharing
    sequences: Total  # sequences of tokens of all answers
    turns: Total  # turns of the model in all answers
    tool_calls: Total
    with_tools: Total  # answers to requests that offered tools
    with_components: Total  # answers whose reward has components
    undecided: Total  # answers that count as wrong because judging them exceeds a limit
    truncated: Total  # answers cut at the limit of new tokens
    failed: Total  # answers lost
    dropped: Total  # ordinals settled without training
    overdue_tokens: Total  # tokens of answers that were dropped before they were finished
    staleness: Total
    """Optimizer steps between the oldest weights that sampled a trained token of an answer and the trained weights,
    summed over answers."""
    staleness_max: Largest


@dataclass(frozen=True, slots=True)
class EnvironmentStats:
    """The part of BatchStats from one environment of several."""

    answers: Total
    groups: Total
    groups_with_signal: Total
    reward: Total  # sum over answers of the reward as scored
    failed: Total  # answers lost
    tokens: Total | None = None  # as in LossStats; None if no rank had anything to train on
    entropy: Total | None = None
    clipped: Total | None = None  # tokens beyond one of the bounds of the policy loss; None for a loss without bounds
    kl: Total | None = None  # None without kl_beta
    teacher_kl: Total | None = None  # as in LossStats; None without a teacher
    judged: Total | None = None


# Fields of LossStats that have parts:
BY_ENVIRONMENT = ("tokens", "entropy", "clip_low", "clip_high", "kl", "teacher_kl", "judged")
OF_LOSS = (
    "tokens",
    "entropy",
    "clipped",
    "kl",
    "teacher_kl",
    "judged",
)
"""Fields of EnvironmentStats that are made of these."""


@dataclass(frozen=True, slots=True)
class LossStats:
    """The loss and sums over its tokens: those with a weight other than 0 and finite log-probs."""

    loss: Total
    tokens: Total
    nonfinite: Total  # tokens with a weight that are left out because a log-prob or the entropy is not finite
    entropy: Total  # entropy in nats of the distributions that the tokens were drawn from
    ratio: Total  # exp(logprobs - old_logprobs)
    ratio_max: Largest
    clip_low: Total | None  # tokens whose gradient the lower bound reduced or removed; None for a loss without bounds
    clip_high: Total | None  # the same of the upper bound
    inference_difference: Total  # |old - inference log-prob|
    inference_difference_max: Largest
    kl: Total | None  # KL penalty before kl_beta and kl_importance; None without kl_beta
    importance_weight: Total | None  # None without grpo.importance
    rejected: Total | None = None  # tokens that `grpo.rejection` leaves out; they are among `tokens`. None without it
    teacher_kl: Total | None = None  # log p of the policy before the step - log p of the teacher, or None
    judged: Total | None = None  # tokens that a teacher judges, or None
    teacher_divergence: Total | None = None  # distill.divergence between the present policy and the teacher, or None
    diverged: Total | None = None  # tokens with such a divergence, or None
    prediction: Total | None = None  # -log p of the prediction layer, of the tokens that it predicts; None if untrained
    predicted: Total | None = None  # tokens that the prediction layer predicts; None if it is not trained
    by_environment: Total | None = None
    """[environments, BY_ENVIRONMENT] parts of each environment, which become those of EnvironmentStats before ranks
    reduce anything; None if the recipe has one environment."""


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """Statistics of the updates of a step. All but `offloaded` are the same on every rank."""

    updates: Largest
    applied: Largest
    grad_norm: Largest  # before clipping, summed over the applied updates
    learning_rate: Largest  # of the last update
    offloaded: Total  # bytes of Adam's state that each update moves from host memory to the device and back


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """Use of the devices in a step."""

    peak_memory: Largest  # bytes of torch's tensors
    power: Total  # watts, summed over the devices that report them
    powers: Total  # devices that report watts
    flops: Total  # floating-point operations that the training passes need by formula; 0 for devices of unknown peak
    peak_flops: Smallest  # operations per second that a device can do; 0 if one is of unknown peak


@dataclass(frozen=True, slots=True)
class RouterStats:
    """Replay of routers in all passes of a step. A choice is of one token in one layer."""

    replayed: Total
    differing: Total  # replayed choices that differ from the router's own
    missing: Total  # tokens without choices of the engine


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of a step, of one rank or of all ranks."""

    batch: BatchStats
    loss: LossStats | None  # None if no rank had anything to train on
    update: UpdateStats
    device: DeviceStats | None  # None for devices that do not report their use
    environments: Mapping[str, EnvironmentStats] = field(default_factory=dict)
    """Environment id -> statistics, the same ids on every rank; empty if the recipe has one environment."""
    router: RouterStats | None = None  # None unless choices of experts are replayed

    def put(self, tally: Tally) -> None:
        for block, stats in self._blocks():
            kind: Any = type(stats)
            for name, reduction in reductions(kind).items():
                if (value := getattr(stats, name)) is not None:
                    tally.put(f"{block}.{name}", reduction, value)

    def reduced(self, total: Mapping[str, float]) -> StepStats:
        blocks: dict[str, Any] = {"loss": None, "device": None, "router": None}
        for block, stats in self._blocks():
            kind: Any = type(stats)
            blocks[block] = kind(**{name: total.get(f"{block}.{name}") for name in reductions(kind)})
        environments = {id: blocks.pop(f"environments/{id}") for id in self.environments}
        return StepStats(**blocks, environments=environments)

    def _blocks(self) -> Iterator[tuple[str, Any]]:
        yield "batch", self.batch
        if self.loss is not None:
            yield "loss", self.loss
        yield "update", self.update
        if self.device is not None:
            yield "device", self.device
        if self.router is not None:
            yield "router", self.router
        for id, stats in self.environments.items():
            yield f"environments/{id}", stats


REDUCE: dict[Reduction, Callable[[Tensor, int], Tensor]] = {
    Reduction.SUM: torch.sum,
    Reduction.MAX: torch.amax,
    Reduction.MIN: torch.amin,
}
NEUTRAL = {Reduction.SUM: 0.0, Reduction.MAX: -math.inf, Reduction.MIN: math.inf}


def uncounted(kind: Callable[..., Stats], *absent: str) -> Stats:
    """Return statistics that change nothing when reduced with others, for a rank whose part another rank counts.

    absent: fields that the other ranks lack too.
    """
    return kind(**{name: None if name in absent else NEUTRAL[of] for name, of in reductions(kind).items()})


def combined(parts: Sequence[LossStats]) -> LossStats:
    if len(parts) == 1:
        return parts[0]
    whole: dict[str, Any] = {}
    for name, reduction in reductions(LossStats).items():
        values = [value for part in parts if (value := getattr(part, name)) is not None]
        whole[name] = REDUCE[reduction](torch.stack(values), 0) if values else None
    return LossStats(**whole)


@cache
def reductions(kind: Any) -> dict[str, Reduction]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: next(part for part in _parts(hint) if isinstance(part, Reduction)) for name, hint in hints.items()}


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for part in (*get_args(hint), *getattr(hint, "__metadata__", ())):
        yield from _parts(part)
