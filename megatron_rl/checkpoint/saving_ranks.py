"""Assignment of tensors that several data-parallel ranks hold to the rank that saves and loads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.transformer.module import MegatronModule

from megatron_rl.checkpoint.stored_shards import StoredShards
from megatron_rl.contract.manifest import CheckpointError, Damaged


def sharded_weights(
    model: MegatronModule,
    data: dist.ProcessGroup,
    expert_data: dist.ProcessGroup,
    part: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """Return a model, or a part of its weights, in megatron-core's sharded form, with saving and loading balanced over
    the ranks with the same part of it, and over those with the same experts."""
    weights = part(model.sharded_state_dict())
    assign_saving_ranks(weights, data.size(), expert_data.size())
    return weights


def assign_saving_ranks(model_state: dict[str, Any], copies: int, expert_copies: int | None = None) -> None:
    """Make each data-parallel rank save and load about the same number of bytes, instead of the first rank all: whole
    tensors, the largest first, each go to the rank with the least so far.

    Every rank computes the same assignment, as all hold the same tensors. megatron-core's own
    (FullyParallelSaveStrategyWrapper, 0.16.1) gathers them from all ranks first. Adam's state that is derived from this
    afterwards follows its weight unless it is distributed.

    Args:
        model_state: megatron-core's sharded state dict of a model: the last number of a `replica_id` is the
            data-parallel rank, and 0 saves. Changed in place.
        copies: the data-parallel size.
        expert_copies: number of ranks with the same experts, if not all data-parallel ranks have the same.
    """
    parts = [item for item in nested_values(model_state) if isinstance(item, ShardedTensor | ShardedTensorFactory)]
    experts = [part for part in parts if expert_copies is not None and not getattr(part.data, "allreduce", True)]
    expert_ids = {id(part) for part in experts}
    _balance([part for part in parts if id(part) not in expert_ids], copies)
    _balance(experts, expert_copies or copies)


# megatron-core lets the rank whose `replica_id` ends in 0 save a tensor: always the first data-parallel rank. Rotating
# that number moves the work. Three ranks hold tensors of 8, 5, 4 and 2 GB: the first saves 8, the second 5, the third
# 4 + 2. For the tensor of 5 GB the ranks then have the numbers 2, 0 and 1 in place of 0, 1 and 2. The number also says
# how far a rank is from the one that saves (`_copy`), which is where it receives the tensor from when it loads.
def _balance(parts: Sequence[Any], copies: int) -> None:
    saved = [0] * copies
    for part in sorted(parts, key=lambda part: -part.data.nbytes):
        rank = saved.index(min(saved))
        saved[rank] += part.data.nbytes
        assert isinstance(part.replica_id, tuple)
        *others, copy = part.replica_id
        part.replica_id = (*others, (copy - rank) % copies)


class LoadOnce(TorchDistLoadShardedStrategy):
    """Load strategy in which one data-parallel rank reads a shared tensor, the one that would save it
    (`assign_saving_ranks`), and sends it to the others, so that a model is read once from the file system.

    megatron-core's own (FullyParallelLoadStrategyWrapper, 0.16.1) can send only CUDA tensors.
    """

    def __init__(self, data: dist.ProcessGroup, expert_data: dist.ProcessGroup) -> None:
        """
        data: ranks with the same part of the model, over the backend of its device.
        expert_data: those of them with the same experts.
        """
        super().__init__()
        self._data = data
        self._expert_data = expert_data

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, *others: Any) -> dict[str, Any]:
        """Fill each tensor of the state dict in place. Collective over all ranks.

        others: further arguments of megatron-core's own strategy: none in 0.16.1, the kind of asynchronous save in
        0.19.0.

        Raises on all ranks:
            Damaged: a rank cannot read its part.
            CheckpointError: the checkpoint lacks an item of a rank, or has it in another shape.
        """
        items = list(nested_values(sharded_state_dict))
        tensors = [item for item in items if isinstance(item, ShardedTensor)]
        received = {id(tensor) for tensor in tensors if _copy(tensor) > 0}
        # Every rank reads the objects it needs: they have a few bytes.
        read = [item for item in items if id(item) not in received]
        loaded = dict(zip(map(id, read), _read_or_fail_together(Path(checkpoint_dir), read), strict=True))
        experts = [tensor for tensor in tensors if _is_expert(tensor)]
        _send_copies([tensor for tensor in tensors if not _is_expert(tensor)], self._data)
        if experts:  # otherwise no rank of the group has any
            _send_copies(experts, self._expert_data)
        return dict_list_map_outplace(lambda item: loaded.get(id(item), item.data), sharded_state_dict)


def _read_or_fail_together(folder: Path, items: Sequence[ShardedBase]) -> list[Any]:
    """Read this rank's items. Collective over all ranks, and fails on all of them: those that read everything would
    otherwise wait for the others' copies."""
    failure: tuple[bool, str] | None = None
    loaded: list[Any] = []
    try:
        loaded = StoredShards(folder).read(items)
    except (OSError, ValueError, LookupError, RuntimeError, AssertionError, EOFError, UnpicklingError) as error:
        failure = isinstance(error, OSError), str(error) or type(error).__name__
    failures: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if found := [each for each in failures if each is not None]:
        if all(of_files for of_files, _ in found):
            raise Damaged(f"{folder} cannot be read: {found[0][1]}")
        raise CheckpointError(
            f"{folder} does not fit this model: {next(why for of_files, why in found if not of_files)}"
        )
    return loaded


def _send_copies(tensors: Sequence[ShardedTensor], group: dist.ProcessGroup) -> None:
    """Fill tensors that other ranks have read. Collective over `group`, whose ranks all hold the same, except for
    distributed Adam state, which only one rank holds."""
    names: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(names, [_name(tensor) for tensor in tensors if _copy(tensor) > 0], group=group)
    sent = set(chain.from_iterable(names))
    for tensor in sorted((tensor for tensor in tensors if _name(tensor) in sent), key=_name):
        # Detach: autograd would warn that it cannot track a weight through a broadcast.
        dist.broadcast(tensor.data.detach(), group=group, group_src=(group.rank() - _copy(tensor)) % group.size())


def _is_expert(tensor: ShardedTensor) -> bool:
    """Whether megatron-core's name is that of an expert. Adam's state contains the name of its weight."""
    return ".experts." in tensor.key


def _copy(tensor: ShardedTensor) -> int:
    """Distance in the ring of data-parallel ranks from the rank that saves the tensor."""
    return tensor.replica_id if isinstance(tensor.replica_id, int) else tensor.replica_id[-1]


def _name(tensor: ShardedTensor) -> str:
    return f"{tensor.key} {tensor.global_offset}"
