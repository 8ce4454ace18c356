"""Which data-parallel rank saves what all of them hold, and loads it for the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.transformer.module import MegatronModule


def sharded_weights(model: MegatronModule, data: dist.ProcessGroup, expert_data: dist.ProcessGroup) -> dict[str, Any]:
    """A model in megatron-core's sharded form, its saving and loading shared out over the ranks with the same part of
    it, and over those with the same experts."""
    weights: dict[str, Any] = model.sharded_state_dict()
    assign_saving_ranks(weights, data.size(), expert_data.size())
    return weights


def assign_saving_ranks(model_state: dict[str, Any], copies: int, expert_copies: int | None = None) -> None:
    """Have each data-parallel rank save, and read back, about as many bytes of the model's tensors as the others,
    instead of the first rank all of them: whole tensors, the largest first, each to the rank with the least so far.

    Every rank finds the same by itself, as all hold the same tensors: megatron-core's own way
    (FullyParallelSaveStrategyWrapper, 0.16.1) gathers them from all ranks first. A state of Adam that is made from
    this afterwards goes with its weight where it is not distributed.

    Args:
        model_state: megatron-core's sharded state dict of a model, as it comes: the last number of a `replica_id` is
            the data-parallel rank, 0 saves. Changed in place.
        copies: the data-parallel size.
        expert_copies: how many ranks hold the same experts, where not all data-parallel ranks do.
    """
    parts = [item for item in nested_values(model_state) if isinstance(item, ShardedTensor | ShardedTensorFactory)]
    experts = [part for part in parts if expert_copies is not None and not getattr(part.data, "allreduce", True)]
    apart = {id(part) for part in experts}
    _share_out([part for part in parts if id(part) not in apart], copies)
    _share_out(experts, expert_copies or copies)


def _share_out(parts: Sequence[Any], copies: int) -> None:
    saved = [0] * copies
    for part in sorted(parts, key=lambda part: -part.data.nbytes):
        rank = saved.index(min(saved))
        saved[rank] += part.data.nbytes
        assert isinstance(part.replica_id, tuple)
        *others, copy = part.replica_id
        part.replica_id = (*others, (copy - rank) % copies)


class LoadOnce(TorchDistLoadShardedStrategy):
    """Has a tensor that several data-parallel ranks hold read by the one that would save it (`assign_saving_ranks`),
    which sends it to the others: a model is read once from the file system, not once by every rank.

    megatron-core's own (FullyParallelLoadStrategyWrapper, 0.16.1) sends through CUDA tensors alone.
    """

    def __init__(self, data: dist.ProcessGroup, expert_data: dist.ProcessGroup) -> None:
        """
        data: this rank and the others with the same part of the model, over the backend of the device it is on.
        expert_data: those of them with the same experts.
        """
        super().__init__()
        self._data = data
        self._expert_data = expert_data

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, *others: Any) -> dict[str, Any]:
        """The state dict, with each tensor filled in place. Collective over all ranks.

        others: arguments of megatron-core's own strategy, none in 0.16.1; 0.19.0 has the kind of asynchronous save.
        """
        items = list(nested_values(sharded_state_dict))
        tensors = [item for item in items if isinstance(item, ShardedTensor)]
        received = {id(tensor) for tensor in tensors if _copy(tensor) > 0}
        # Objects are read by every rank that wants them: what is no rank's own in them is a few bytes.
        loaded = super().load(
            {str(id(item)): item for item in items if id(item) not in received}, checkpoint_dir, *others
        )
        experts = [tensor for tensor in tensors if _is_expert(tensor)]
        _send_copies([tensor for tensor in tensors if not _is_expert(tensor)], self._data)
        if experts:  # else none of the ranks that share this one's has any
            _send_copies(experts, self._expert_data)
        return dict_list_map_outplace(lambda item: loaded.get(str(id(item)), item.data), sharded_state_dict)


def _send_copies(tensors: Sequence[ShardedTensor], group: dist.ProcessGroup) -> None:
    """Fill those that others have read. Collective over `group`, all of whose ranks hold the same, but for what is one
    rank's alone: Adam's state where it is distributed."""
    names: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(names, [_name(tensor) for tensor in tensors if _copy(tensor) > 0], group=group)
    sent = set(chain.from_iterable(names))
    for tensor in sorted((tensor for tensor in tensors if _name(tensor) in sent), key=_name):
        # Detached: a weight needs a gradient, and autograd would warn that it cannot follow it through a broadcast.
        dist.broadcast(tensor.data.detach(), group=group, group_src=(group.rank() - _copy(tensor)) % group.size())


def _is_expert(tensor: ShardedTensor) -> bool:
    """By megatron-core's name for it; of Adam's state too, which has the name of the weight in its own."""
    return ".experts." in tensor.key


def _copy(tensor: ShardedTensor) -> int:
    """How many data-parallel ranks this one comes after the rank that saves the tensor, in their circle."""
    return tensor.replica_id if isinstance(tensor.replica_id, int) else tensor.replica_id[-1]


def _name(tensor: ShardedTensor) -> str:
    return f"{tensor.key} {tensor.global_offset}"
