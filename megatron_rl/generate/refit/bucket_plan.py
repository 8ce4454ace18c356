"""Rounds in which training ranks fill buckets for vLLM's workers on their devices. Pure.

Worker w of front f, with `workers` in each front, computes on the device of training rank f * workers + w. Together the
workers of a front get every weight once, in the order in which they load them:

    round      0             1             2
    worker 0   embedding     embedding     layer 0: qkv
    worker 1                               layer 0: proj, fc1

A worker takes what a round brings for it before any worker of its front loads a weight of that round, so none waits for
a worker that waits for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_rl.generate.refit.packages import aligned
from megatron_rl.generate.refit.plan import Box, cut
from megatron_rl.model.lora_mapping import adapted_weight, is_adapter
from megatron_rl.model.sharded_names import loading_order, weight_name


class Announced(NamedTuple):
    """A weight, with its adapter, that the workers of a front load."""

    name: str
    worker: int
    """Number of the worker that gets it."""
    dtype: str
    last_round: int
    """Round with its last part."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a weight in the half of a bucket."""

    source: int
    target: int
    box: Box
    held: Box
    """Tensor of the source that contains it."""
    at: int = 0
    """Byte at which it begins in the half of the target."""

    @property
    def bytes(self) -> int:
        """Bytes in the half. Parts begin at multiples of ALIGNMENT."""
        return aligned(self.box.bytes)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    rounds: list[list[Part]]
    """Parts of each round, in the order of targets, and of sources for each. The parts from one source are adjacent in
    the half of the target."""
    announced: dict[int, list[Announced]]
    """Front -> all weights in the order of loading."""


def plan_buckets(
    held: Sequence[Iterable[Box]], fronts: Sequence[int], workers: int, half: int, near: int | None = None
) -> BucketPlan:
    """Plan a version.

    Among ranks that hold the same box, the target sends it; else one of its node, if there is one; of those, the one
    that has sent least so far.

    Args:
        held: boxes of each training rank. Boxes of one tensor are equal or disjoint.
        fronts: numbers of those whose workers take it.
        workers: of each front.
        half: most bytes that a rank gets, and sends to others, in a round; a multiple of ALIGNMENT.
        near: number of neighbouring ranks on one node; None: all are on one.

    Raises ValueError: an adapter has no weight.
    """
    holders = _holders(held)
    weights = _weights(holders)
    owners = _owners(weights, workers)
    dtypes = {name: _dtype(name, boxes) for name, boxes in weights.items()}
    sent: Counter[int] = Counter()
    queues: dict[int, deque[tuple[str, Part]]] = {front: deque() for front in fronts}
    for front, queue in queues.items():
        for name, boxes in weights.items():
            target = front * workers + owners[name]
            for box in boxes:
                source = _source(target, holders[box], sent, near or len(held))
                if source != target:
                    sent[source] += box.bytes
                parts = cut(box, half // box.dtype.itemsize)
                queue.extend((name, Part(source, target, part, box)) for part in parts)
    packed = _Rounds(half)
    packed.fill(queues)
    announced = {
        front: [Announced(name, owners[name], dtypes[name], packed.last[front, name]) for name in weights]
        for front in fronts
    }
    return BucketPlan([_laid_out(parts) for parts in packed.rounds], announced)


def _holders(held: Sequence[Iterable[Box]]) -> dict[Box, list[int]]:
    """Ranks that hold each distinct box."""
    found: dict[Box, list[int]] = defaultdict(list)
    for rank, boxes in enumerate(held):
        for box in boxes:
            found[box].append(rank)
    return found


def _source(target: int, ranks: Sequence[int], sent: Mapping[int, int], near: int) -> int:
    if target in ranks:
        return target
    return min(ranks, key=lambda rank: (rank // near != target // near, sent[rank], abs(rank - target), rank))


def _weights(boxes: Iterable[Box]) -> dict[str, list[Box]]:
    """Boxes of each weight and its adapter, in the order of loading."""
    found: dict[str, list[Box]] = defaultdict(list)
    for box in boxes:
        found[_loaded_with(box)].append(box)
    return {
        name: sorted(found[name], key=lambda box: (box.key, box.offset)) for name in sorted(found, key=loading_order)
    }


def _loaded_with(box: Box) -> str:
    return adapted_weight(weight_name(box.key, box.offset))


def _owners(weights: dict[str, list[Box]], workers: int) -> dict[str, int]:
    """Worker that gets each weight: the one that has got least before it."""
    got = [0] * workers
    owners = {}
    for name, boxes in weights.items():
        owners[name] = worker = min(range(workers), key=got.__getitem__)
        got[worker] += sum(box.bytes for box in boxes)
    return owners


def _dtype(name: str, boxes: Sequence[Box]) -> str:
    whole = next((box for box in boxes if not is_adapter(box.key)), None)
    if whole is None:
        raise ValueError(f"the training ranks hold an adapter of {name}, but not the weight")
    return str(whole.dtype).removeprefix("torch.")


class _Rounds:
    """Rounds in which no rank gets, or sends to others, more than a half of its bucket."""

    def __init__(self, half: int) -> None:
        self._half = half
        self.rounds: list[list[Part]] = []
        self.last: dict[tuple[int, str], int] = {}
        """Last round of a front's weight."""

    def fill(self, queues: dict[int, deque[tuple[str, Part]]]) -> None:
        """Empty each front's queue of parts in its order, so that a worker needs little memory for what has come before
        it can load it."""
        fronts = deque(queues)
        while any(queues.values()):
            got: Counter[int] = Counter()
            sent: Counter[int] = Counter()
            self.rounds.append([])
            for front in fronts:
                self._take(front, queues[front], got, sent)
            fronts.rotate(1)  # fronts that come first have the choice of senders

    def _take(self, front: int, queue: deque[tuple[str, Part]], got: Counter[int], sent: Counter[int]) -> None:
        while queue:
            name, part = queue[0]
            ends = [(got, part.target), *([(sent, part.source)] if part.source != part.target else [])]
            if any(count[rank] + part.bytes > self._half for count, rank in ends):
                return
            queue.popleft()
            for count, rank in ends:
                count[rank] += part.bytes
            self.rounds[-1].append(part)
            self.last[front, name] = len(self.rounds) - 1


def _laid_out(parts: Iterable[Part]) -> list[Part]:
    filled: Counter[int] = Counter()
    placed = []
    for part in sorted(parts, key=lambda part: (part.target, part.source)):
        placed.append(replace(part, at=filled[part.target]))
        filled[part.target] += part.bytes
    return placed
