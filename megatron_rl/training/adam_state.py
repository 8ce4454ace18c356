"""Adam's state as boxes of the model's own tensors: a checkpoint of it loads into any layout.

megatron-core's distributed optimizer gives each data-parallel rank a range of a parameter's elements in row-major
order. megatron-core (0.16.1 and 0.19.2) either saves what lies in its buckets as it is, which loads into other
data-parallel sizes only, or first gathers all of it on every rank, which holds up training and takes a whole replica's
memory on each. But a range of a matrix is at most three boxes (the end of a row, whole rows, the beginning of a row),
and boxes of the model's tensors are what a checkpoint consists of. So each rank saves what it has and sends nothing,
and any other tensor-, pipeline- or data-parallel size, with the distributed optimizer or without, finds its own boxes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank's optimizer holds of one of the model's parameters."""

    parameter: Parameter
    start: int
    """Its elements from here on, in row-major order ..."""
    tensors: dict[str, Tensor]
    """... as Adam has them: both moments, and `param`, the fp32 weights, where the model's own are not fp32."""
    replicated: bool
    """Whether every data-parallel rank holds the same: the optimizer is not distributed."""


def adam_tensors(optimizer: Any, parameters: Iterable[Parameter]) -> Iterator[Tensor]:
    """Adam's moments and fp32 weights on this rank, each with a storage of its own. optimizer: as below."""
    return chain.from_iterable(share.tensors.values() for share in _shares(optimizer, parameters))


def sharded_adam_state(
    optimizer: Any, parameters: Iterable[Parameter], model_state: dict[str, Any], held: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Adam's moments and fp32 weights on this rank, in megatron-core's sharded form.

    All of it are views: to load it is to fill the optimizer in place. The count of updates is `get_step`.

    Args:
        optimizer: of megatron-core, not a chain of them.
        model_state: the model's sharded state with these parameters, neither saved nor loaded yet.
        held: where the numbers of one of `adam_tensors` are.
    """
    of_parameter = {
        id(item.data): item
        for item in nested_values(model_state)
        if isinstance(item, ShardedTensor | ShardedTensorFactory)
    }
    state: dict[str, Any] = {}
    for share in _shares(optimizer, parameters):
        place = of_parameter[id(share.parameter)]
        # A factory where gate and up projection, two tensors of the model, are one parameter.
        parts = place.build() if isinstance(place, ShardedTensorFactory) else [place]
        for part in parts:
            for name in share.tensors:
                flat = held(share.tensors[name]).detach().view(-1)
                for piece in _pieces(f"optimizer.state.{name}.{part.key}", flat, share, part):
                    state[f"{piece.key} {piece.global_offset}"] = piece
    return state


def begin(adam: torch.optim.Optimizer) -> None:
    """Make Adam's state, all zero, which it would make itself in its first update: so there is something to load into,
    and to save where no update was applied yet."""
    weights = [weight for group in adam.param_groups for weight in group["params"]]
    if not weights:
        return
    rates = [group["lr"] for group in adam.param_groups]
    for group in adam.param_groups:
        group["lr"] = 0.0  # so the weights do not decay either
    # One for all: gradients of their own would take a third of the state.
    zeros = torch.zeros_like(max(weights, key=torch.numel)).view(-1)
    for weight in weights:
        weight.grad = zeros[: weight.numel()].view(weight.shape)
    adam.step()
    adam.zero_grad()
    for group, rate in zip(adam.param_groups, rates, strict=True):
        group["lr"] = rate
    set_step(adam, 0)


def get_step(adam: torch.optim.Optimizer) -> int:
    """How many updates Adam has made; 0 where it has no weights on this rank."""
    return max((int(counter["step"]) for counter in _counters(adam)), default=0)


def set_step(adam: torch.optim.Optimizer, step: int) -> None:
    """Each counter stays a tensor of its own: with one for all, which is what DistributedOptimizer.load_state_dict
    leaves in torch's Adam (0.16.1 and 0.19.2), every parameter's update would count for all."""
    for counter in _counters(adam):
        counter["step"] = torch.full_like(counter["step"], step) if torch.is_tensor(counter["step"]) else step


def _counters(adam: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """torch's Adam counts for each parameter, Transformer Engine's and Apex's for each group."""
    return (part for part in (*adam.state.values(), *adam.param_groups) if "step" in part)


def _shares(optimizer: Any, parameters: Iterable[Parameter]) -> Iterator[Share]:
    if not isinstance(optimizer, DistributedOptimizer):
        for parameter in parameters:
            main = getattr(parameter, "main_param", parameter)  # there where the model is not fp32
            if main in optimizer.optimizer.state:
                yield _share(optimizer, parameter, main, 0, replicated=True)
        return
    for bucket in chain.from_iterable(chain.from_iterable(b.values()) for b in optimizer.gbuf_ranges):
        for parameter, ranges in bucket["param_map"].items():
            group, index = optimizer.model_param_group_index_map[parameter]
            main = optimizer.optimizer.param_groups[group]["params"][index]
            yield _share(optimizer, parameter, main, ranges["param"].start, replicated=False)


def _share(optimizer: Any, parameter: Parameter, main: Tensor, start: int, *, replicated: bool) -> Share:
    adam = optimizer.optimizer.state[main]
    tensors = {name: adam[name] for name in ("exp_avg", "exp_avg_sq")}
    if parameter.dtype != main.dtype:
        tensors["param"] = main
    return Share(parameter, start, tensors, replicated)


def _pieces(key: str, flat: Tensor, share: Share, part: ShardedTensor) -> Iterator[ShardedTensor]:
    """The boxes of the whole model's tensor that a share fills. flat: one of its tensors. part: what of the model's
    this rank's parameter, or one of the two tensors in it, is."""
    first = part.data.storage_offset() - share.parameter.storage_offset() - share.start  # of the part, in `flat`
    start = max(0, -first)
    end = max(start, min(part.data.numel(), len(flat) - first))
    layers, whole = part.prepend_axis_num, first + start
    for offset, size in boxes(part.local_shape, start, end):
        length = math.prod(size)
        shape = (1,) * layers + size
        corner = (o + c for o, c in zip(offset, part.global_offset[layers:], strict=True))
        yield ShardedTensor(
            key=key,
            data=flat[whole : whole + length].view(shape),
            dtype=flat.dtype,
            local_shape=shape,
            global_shape=part.global_shape,
            global_offset=(*part.global_offset[:layers], *corner),
            axis_fragmentations=None,
            replica_id=part.replica_id if share.replicated else (*part.replica_id[:2], 0),
            allow_shape_mismatch=part.allow_shape_mismatch,
        )
        whole += length


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size."""


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The elements start..end-1, in row-major order, of a tensor of this shape as boxes that follow one another: the
    fewest there can be, at most 2 * dimensions - 1."""
    if len(shape) == 1:
        if start < end:
            yield (start,), (end - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # the whole rows are first..last-1
    if first > last:
        yield from _in_row(shape, last, start, end)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: Sequence[int], index: int, start: int, end: int) -> Iterator[Box]:
    row = math.prod(shape[1:])
    for offset, size in boxes(shape[1:], start - index * row, end - index * row):
        yield (index, *offset), (1, *size)
