"""A model split over ranks, and the whole of it on one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_rl.model.lora_mapping import is_adapter


def groups_of_one() -> ProcessGroupCollection:
    """Return groups for a model that is whole on this rank. Collective over all ranks."""
    alone, _ = dist.new_subgroups(group_size=1)
    return ProcessGroupCollection(**{each.name: alone for each in fields(ProcessGroupCollection) if each.name != "hcp"})


def send_no_tokens(policy: Any) -> None:
    """Make tensor-parallel ranks, each with a part of every expert, compute it on all tokens and sum the results. No-op
    for layers without experts.

    Each of these ranks has the same tokens. megatron-core would gather them, so that every expert would get each token
    from every rank. Not for training: the sum has no gradient.
    """
    for module in policy.modules():
        if isinstance(module, MoELayer):
            _send_no_tokens(module, policy.pg_collection)


def _send_no_tokens(mlp: MoELayer, groups: ProcessGroupCollection) -> None:
    dispatcher = mlp.token_dispatcher = type(mlp.token_dispatcher)(
        mlp.num_local_experts,
        mlp.local_expert_indices,
        config=mlp.config,
        pg_collection=ProcessGroupCollection(ep=groups.ep, expt_tp=groups.ep, tp_ep=groups.ep),
    )

    restored = dispatcher.combine_postprocess

    def total(rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = restored(rows)
        dist.all_reduce(output, group=groups.tp)
        return output

    dispatcher.combine_postprocess = total  # before a shared expert's result is added, which each rank has whole


@torch.no_grad()
def copy_part(whole: Any, part: Any) -> None:
    """Copy weights of a whole model into a rank's part of it: its tensor-parallel rows or columns, layers and experts.
    whole, part: megatron-core models of the same shape. Adapters of `part` stay as they are: `whole` has none."""
    boxes: dict[str, list[ShardedTensor]] = defaultdict(list)
    for box in _boxes(whole):
        boxes[box.key].append(box)
    for box in _boxes(part):
        if is_adapter(box.key):
            continue
        box.data.copy_(next(found for source in boxes[box.key] if (found := _within(source, box)) is not None))


def _boxes(model: Any) -> Iterator[ShardedTensor]:
    """Boxes of a model's weights within the tensors of the whole model; gate and up projection separately."""
    for item in nested_values(model.sharded_state_dict()):
        if isinstance(item, ShardedTensorFactory):
            yield from item.build()
        elif isinstance(item, ShardedTensor):
            yield item


def _within(source: ShardedTensor, box: ShardedTensor) -> torch.Tensor | None:
    """The part of `source` at the position of `box`; None if it does not contain the box."""
    stacked = box.prepend_axis_num  # layers or experts: a box has one of each
    if source.global_offset[:stacked] != box.global_offset[:stacked]:
        return None
    first = [b - s for b, s in zip(box.global_offset[stacked:], source.global_offset[stacked:], strict=True)]
    if any(at < 0 or at + size > of for at, size, of in zip(first, box.data.shape, source.data.shape, strict=True)):
        return None
    return source.data[tuple(slice(at, at + size) for at, size in zip(first, box.data.shape, strict=True))]
