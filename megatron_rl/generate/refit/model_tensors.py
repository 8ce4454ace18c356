"""A rank's part of a model as boxes of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_rl.generate.refit.plan import Box
from megatron_rl.model.policy import Policy
from megatron_rl.model.sharded_names import PREDICTION


@dataclass(frozen=True, slots=True)
class ModelTensor:
    whole: Tensor
    parts: Mapping[Box, Tensor]
    """Views of it, each in the shape of its box: one, or two for a fused gate and up projection."""


def model_tensors(policy: Policy) -> dict[tuple[Box, ...], ModelTensor]:
    """This rank's weights, by the boxes of the model that each covers, without the prediction layer: no engine gets
    it."""
    found = {}
    for item in nested_values(policy.sharded_state_dict()):
        if isinstance(item, ShardedTensor | ShardedTensorFactory) and not item.key.startswith(PREDICTION):
            shards = item.build() if isinstance(item, ShardedTensorFactory) else [item]
            parts = {}
            for each in shards:
                shape = (*[1] * each.prepend_axis_num, *each.local_shape)
                parts[Box(each.key, each.dtype, each.global_offset, shape)] = each.data.detach().view(shape)
            found[tuple(parts)] = ModelTensor(item.data, parts)
    return found


def weights_by_box(policy: Policy) -> dict[Box, Tensor]:
    return parts_by_box(model_tensors(policy).values())


def parts_by_box(tensors: Iterable[ModelTensor]) -> dict[Box, Tensor]:
    return {box: part for tensor in tensors for box, part in tensor.parts.items()}
