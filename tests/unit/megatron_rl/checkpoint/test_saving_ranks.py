"""Data-parallel ranks each save a similar share of what all of them hold, and every tensor exactly once."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

from megatron_rl.checkpoint.saving_ranks import assign_saving_ranks


def state_of(rank: int, sizes: list[int], tensor_rank: int = 0) -> dict[str, Any]:
    return {
        f"w{number}": ShardedTensor.from_rank_offsets(
            f"w{number}", torch.empty(size, device="meta"), replica_id=(0, tensor_rank, rank)
        )
        for number, size in enumerate(sizes)
    }


def saved_by(rank: int, copies: int, sizes: list[int], tensor_rank: int = 0) -> dict[str, int]:
    """Name -> bytes of the tensors that a rank saves."""
    state = state_of(rank, sizes, tensor_rank)
    assign_saving_ranks(state, copies, expert_copies=1)
    return {name: tensor.data.nbytes for name, tensor in state.items() if is_main_replica(tensor.replica_id)}


@given(sizes=st.lists(st.integers(1, 10**9), max_size=40), copies=st.integers(1, 9))
def test_every_tensor_is_saved_once_and_shares_differ_by_at_most_a_tensor(sizes: list[int], copies: int) -> None:
    shares = [saved_by(rank, copies, sizes) for rank in range(copies)]
    assert sorted(name for share in shares for name in share) == sorted(state_of(0, sizes))
    loads = [sum(share.values()) for share in shares]
    assert max(loads) - min(loads) <= 4 * max(sizes, default=0)


def test_tensor_parallel_ranks_with_the_same_tensor_save_it_once() -> None:
    assert saved_by(0, 2, [8, 8], tensor_rank=0) == {"w0": 32}
    assert saved_by(1, 2, [8, 8], tensor_rank=0) == {"w1": 32}
    assert saved_by(0, 2, [8, 8], tensor_rank=1) == saved_by(1, 2, [8, 8], tensor_rank=1) == {}


def test_experts_are_balanced_over_the_ranks_that_hold_the_same() -> None:
    """Four data-parallel ranks; the first and the third have the same experts."""
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    saved = []
    for rank in range(4):
        weights = [torch.empty(8, device="meta") for _ in range(2)]
        for weight in weights:
            weight.allreduce = False  # type: ignore[attr-defined]  # set by megatron-core
        state = {
            str(number): ShardedTensor.from_rank_offsets(key, weight, (0, rank % 2, 2), replica_id=(0, 0, rank // 2))
            for number, weight in enumerate(weights)
        }
        assign_saving_ranks(state, copies=4, expert_copies=2)
        saved.append([number for number, tensor in state.items() if is_main_replica(tensor.replica_id)])
    assert saved == [["0"], ["0"], ["1"], ["1"]]
