"""Adam's state as boxes of the model's own tensors: a checkpoint of it loads into any layout.

megatron-core's distributed optimizer gives each data-parallel rank a range of a parameter's elements in row-major
order. megatron-core (0.16.1 and 0.19.2) either saves its buckets as they are, which loads only into other data-parallel
sizes, or first gathers everything on every rank, which stops the training and needs a whole replica's memory on each.
But a range of a matrix is at most three boxes (the end of a row, whole rows, the start of a row), and checkpoints
consist of boxes of the model's tensors. So each rank saves its own boxes and sends nothing, and any other tensor-,
pipeline- or data-parallel size, with or without the distributed optimizer, finds its boxes.

Example: elements 3..9 of a [4, 3] matrix are the box of rows 1 and 2 and the box of the first element of row 3.
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
class AdamShare:
    """The part of one model parameter that this rank's optimizer holds."""

    parameter: Parameter
    start: int  # first element of the part, in row-major order
    tensors: dict[str, Tensor]
    """Adam's flat tensors from there on: both moments, and `param`, the fp32 weights of a model that is not fp32."""
    replicated: bool  # whether every data-parallel rank holds the same part: the optimizer is not distributed


def adam_tensors(optimizer: Any, parameters: Iterable[Parameter]) -> Iterator[Tensor]:
    """Adam's moments and fp32 weights on this rank, each with its own storage. optimizer: as below."""
    return chain.from_iterable(share.tensors.values() for share in _shares(optimizer, parameters))


def sharded_adam_state(
    optimizer: Any, parameters: Iterable[Parameter], model_state: dict[str, Any], held: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Return Adam's moments and fp32 weights on this rank in megatron-core's sharded form.

    All are views: loading into them fills the optimizer in place. `get_step` has the count of updates.

    Args:
        optimizer: of megatron-core, not a chain of them.
        model_state: the model's sharded state with these parameters as `held` returns them, neither saved nor loaded
            yet.
        held: maps a parameter or one of `adam_tensors` to the tensor that holds its values now, the same one each time.
    """
    of_parameter = {
        id(item.data): item
        for item in nested_values(model_state)
        if isinstance(item, ShardedTensor | ShardedTensorFactory)
    }
    state: dict[str, Any] = {}
    for share in _shares(optimizer, parameters):
        weight = held(share.parameter)
        sharded = of_parameter[id(weight)]
        # Gate and up projection, two tensors of a checkpoint, are one parameter: a factory builds both.
        parts = sharded.build() if isinstance(sharded, ShardedTensorFactory) else [sharded]
        for part in parts:
            for name in share.tensors:
                flat = held(share.tensors[name]).detach().view(-1)
                for piece in _pieces(f"optimizer.state.{name}.{part.key}", flat, share, weight, part):
                    state[f"{piece.key} {piece.global_offset}"] = piece
    return state


def begin(adam: torch.optim.Optimizer) -> None:
    """Create Adam's state, all zero, instead of in its first update: loading needs it, as does saving before an update
    was applied."""
    weights = [weight for group in adam.param_groups for weight in group["params"]]
    if not weights:
        return
    rates = [group["lr"] for group in adam.param_groups]
    for group in adam.param_groups:
        group["lr"] = 0.0  # also prevents weight decay
    # One tensor for all gradients: separate ones would need a third of the state's memory.
    zeros = torch.zeros_like(max(weights, key=torch.numel)).view(-1)
    for weight in weights:
        weight.grad = zeros[: weight.numel()].view(weight.shape)
    adam.step()
    adam.zero_grad()
    for group, rate in zip(adam.param_groups, rates, strict=True):
        group["lr"] = rate
    set_step(adam, 0)


def get_step(adam: torch.optim.Optimizer) -> int:
    """Number of Adam's updates; 0 without weights on this rank."""
    return max((int(counter["step"]) for counter in _counters(adam)), default=0)


def set_step(adam: torch.optim.Optimizer, step: int) -> None:
    """Set the number of Adam's updates. Each counter stays a separate tensor: with a shared one, which
    DistributedOptimizer.load_state_dict leaves in torch's Adam (0.16.1 and 0.19.2), every parameter's update would
    count for all."""
    for counter in _counters(adam):
        counter["step"] = torch.full_like(counter["step"], step) if torch.is_tensor(counter["step"]) else step


def _counters(adam: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """Dictionaries with a counter `step`: one per parameter in torch's Adam, one per group in TE's and Apex's."""
    return (part for part in (*adam.state.values(), *adam.param_groups) if "step" in part)


def _shares(optimizer: Any, parameters: Iterable[Parameter]) -> Iterator[AdamShare]:
    replicated = not isinstance(optimizer, DistributedOptimizer)
    for parameter, main, start in updated_weights(optimizer, parameters):
        yield _share(optimizer, parameter, main, start, replicated=replicated)


def updated_weights(optimizer: Any, parameters: Iterable[Parameter]) -> Iterator[tuple[Parameter, Tensor, int]]:
    """Yield each parameter of which Adam updates a part on this rank, with the tensor that it updates, and where that
    begins in the flat parameter. A distributed optimizer yields all its parameters, whichever are given."""
    if not isinstance(optimizer, DistributedOptimizer):
        for parameter in parameters:
            main = getattr(parameter, "main_param", parameter)  # set if the model is not fp32
            if main in optimizer.optimizer.state:
                yield parameter, main, 0
        return
    # Not by `model_param_group_index_map`, which is wrong where weights have several dtypes (0.16.1): it numbers the
    # weights of a group as they lie in buffers, but Adam's are those in fp32 first.
    groups = (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
    )
    mains = {
        parameter: main
        for model_groups, main_groups in groups
        for parameters, shards in zip(model_groups, main_groups, strict=True)
        for parameter, main in zip(parameters, shards, strict=True)
    }
    for bucket in chain.from_iterable(chain.from_iterable(b.values()) for b in optimizer.gbuf_ranges):
        for parameter, ranges in bucket["param_map"].items():
            yield parameter, mains[parameter], ranges["param"].start


def _share(optimizer: Any, parameter: Parameter, main: Tensor, start: int, *, replicated: bool) -> AdamShare:
    adam = optimizer.optimizer.state[main]
    tensors = {name: adam[name] for name in ("exp_avg", "exp_avg_sq")}
    if parameter.dtype != main.dtype:
        tensors["param"] = main
    return AdamShare(parameter, start, tensors, replicated)


def _pieces(key: str, flat: Tensor, share: AdamShare, weight: Tensor, part: ShardedTensor) -> Iterator[ShardedTensor]:
    """Boxes of the whole model's tensor that a share fills.

    flat: one of the share's tensors. weight: holds the values of its parameter. part: this rank's parameter, or one of
    two tensors in it, within the model.
    """
    first = part.data.storage_offset() - weight.storage_offset() - share.start  # index of the part in `flat`
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


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size, per dimension


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """Cover the elements start..end-1, in row-major order, of a tensor of this shape by consecutive boxes: the fewest
    possible, at most 2 * dimensions - 1."""
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
