"""A rank of a world whose other ranks do not exist: collectives return at once and change nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.generate.refit import bucket_sender, rank_refit, transfer
from megatron_rl.generate.refit.bucket_channel import BucketChannel
from megatron_rl.generate.refit.epoch import DEVICE, Epoch, Member
from megatron_rl.generate.refit.plan import Box, Move, lasting, rounds_of
from megatron_rl.generate.refit.transfer_group import Agreement
from megatron_rl.rank.control import Control, Value
from megatron_rl.rank.groups import Groups, cut, disconnect
from megatron_rl.recipe.job import TrainingLayout

# Operations of c10d without a kernel for tensors without values (torch 2.13).
_WITHOUT_KERNEL = ("reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_")


@contextmanager
def alone_in(world: int, rank: int, layout: TrainingLayout) -> Iterator[Groups]:
    """Groups of one rank of a world of `world` ranks, as `rank.groups.connect` would create them."""
    library = torch.library.Library("c10d", "IMPL")
    for name in _WITHOUT_KERNEL:
        library.impl(name, lambda *_: FakeWork().boxed(), "Meta")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with (
            mock.patch.object(Control, "connect", lambda *_: LoneControl(rank, world)),
            mock.patch.object(dist, "all_gather_object", _gather_equal_objects),
            mock.patch.object(dist, "all_gather", _gather_equal_tensors),
            mock.patch.object(rank_refit, "plan_moves", lambda held, needed: []),  # other ranks' boxes are unknown
            mock.patch.object(transfer, "agree", _send_everything),
            mock.patch.object(bucket_sender, "allocate", PhantomBucket),
            mock.patch.object(dist, "batch_isend_irecv", lambda operations: []),
            balanced_routing(),
        ):
            yield cut(layout, timedelta(minutes=1))
    finally:
        disconnect(None)


class LoneControl(Control):
    """Has no connections, so that what this rank sends is the result."""

    def gather(self, own: Value) -> list[Value]:
        return [own] * self.size


class LoneSender:
    rank = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def exchange(self, sends: Any, receives: Any) -> None:
        """Nobody is there."""


class LoneBuckets:
    """Group of a rank that gives all its weights to the worker on its device, and as many to another rank, if there is
    one. Workers acknowledge at once."""

    rank, workers = 0, 1

    def __init__(self, world: int) -> None:
        self.ranks = min(world, 2)
        members = tuple(Member(replica, 0, 1, DEVICE) for replica in range(self.ranks))
        self.epoch = Epoch(0, "", 0, "", self.ranks, members, DEVICE)
        self.channel: Any = mock.MagicMock(spec=BucketChannel)

    def gather(self, content: Any) -> list[Any]:
        return [content, *[[]] * (self.ranks - 1)]

    def agree(self, failure: str | None) -> None:
        assert failure is None, failure


class PhantomBucket:
    def __init__(self, size: int, device: torch.device) -> None:
        self.content = torch.empty(size, dtype=torch.uint8, device=device)
        self.description: dict[str, Any] = {}
        self.descriptors: list[int] = []

    def close(self) -> None:
        del self.content


def _send_everything(group: LoneSender, held: Iterable[Box], needed: Any, round_bytes: int) -> Agreement:
    moves = [Move(group.rank, group.rank + 1, box, box, box) for box in held]
    once, always = (rounds_of(each, round_bytes) for each in lasting(moves))
    moved_bytes = sum(move.box.bytes for moves in always for move in moves)
    return Agreement([], once, always, moved_bytes, {group.rank + 1: 1}, None)


def _gather_equal_objects(gathered: list[Any], own: Any, group: dist.ProcessGroup | None = None) -> None:
    gathered[:] = [own] * len(gathered)


def _gather_equal_tensors(gathered: list[Tensor], tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    for each in gathered:
        each.copy_(tensor)


_preprocess = MoEAlltoAllTokenDispatcher.preprocess


# Balanced routing. The router's scores have no values here, so it cannot choose experts, and the dispatcher would stop
# where it reads on the host how many tokens go to each. The rehearsal deals experts out in turn instead. With 3 tokens,
# 4 experts and 2 experts for each token:
#
#     token 0 -> experts 0 1      token 1 -> experts 2 3      token 2 -> experts 0 1
#
# A trained router is close to that, but it is not an upper bound: ranks with popular experts hold more tokens.
@contextmanager
def balanced_routing() -> Iterator[None]:
    """Have every rank send each expert the same number of tokens, inside a `with` block. Patches megatron-core's
    dispatcher, which reads the counts and the mask on the host."""
    with (
        mock.patch.object(MoEAlltoAllTokenDispatcher, "preprocess", _count),
        mock.patch.object(token_dispatcher, "permute", _permute),
    ):
        yield


def equal_shares(tokens: int, experts: int, chosen: int) -> Tensor:
    """[tokens, experts] bool routing map: `chosen` experts for each token; loads of experts differ by at most one."""
    places = torch.arange(tokens * chosen).view(tokens, chosen) % experts
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, places, True)


def _count(dispatcher: MoEAlltoAllTokenDispatcher, routing_map: Tensor) -> Tensor:
    """`preprocess` of equal shares, which have values and are the same on all ranks."""

    def all_gather(counts: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        return counts.repeat(group.size())

    shares = equal_shares(len(routing_map), routing_map.shape[1], dispatcher.config.moe_router_topk)
    with mock.patch.object(token_dispatcher, "gather_from_sequence_parallel_region", all_gather):
        counts: Tensor = _preprocess(dispatcher, shares)
    return counts


def _permute(
    tokens: Tensor, routing_map: Tensor, *, probs: Tensor, num_out_tokens: int, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.zeros(num_out_tokens, dtype=torch.long, device=tokens.device)
    return tokens.index_select(0, rows), probs.T.contiguous().view(-1).index_select(0, rows), rows
