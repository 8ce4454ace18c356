"""Which data-parallel rank saves what all of them hold."""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory


def share_out_replicas(model_state: dict[str, Any], copies: int) -> None:
    """Have each data-parallel rank save about as many bytes of the model's tensors as the others, instead of the first
    rank all of them: whole tensors, the largest first, each to the rank with the least so far.

    Every rank finds the same by itself, as all hold the same tensors: megatron-core's own way
    (FullyParallelSaveStrategyWrapper, 0.16.1) gathers them from all ranks first. A state of Adam that is made from
    this afterwards goes with its weight where it is not distributed.

    Args:
        model_state: megatron-core's sharded state dict of a model, as it comes: the last number of a `replica_id` is
            the data-parallel rank, 0 saves. Changed in place.
        copies: the data-parallel size.
    """
    tensors = [item for item in nested_values(model_state) if isinstance(item, ShardedTensor | ShardedTensorFactory)]
    saved = [0] * copies
    for item in sorted(tensors, key=lambda item: -item.data.nbytes):
        rank = saved.index(min(saved))
        saved[rank] += item.data.nbytes
        assert isinstance(item.replica_id, tuple)
        *others, copy = item.replica_id
        item.replica_id = (*others, (copy - rank) % copies)
