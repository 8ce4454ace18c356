"""A rank of a world whose other ranks do not exist: collectives return at once and change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.rank.config import TrainingLayout
from megatron_rl.rank.groups import Groups, cut, disconnect
from megatron_rl.refit import publish
from megatron_rl.rehearse.routing import balanced_routing

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
            mock.patch.object(dist, "all_gather_object", _gather_equal_objects),
            mock.patch.object(dist, "all_gather", _gather_equal_tensors),
            mock.patch.object(publish, "plan_moves", _nothing_moves),
            balanced_routing(),
        ):
            yield cut(layout, timedelta(minutes=1))
    finally:
        disconnect(None)


def _gather_equal_objects(gathered: list[Any], own: Any, group: dist.ProcessGroup | None = None) -> None:
    gathered[:] = [own] * len(gathered)


def _nothing_moves(held: Any, needed: Any) -> list[Any]:
    """No moves, since the boxes of other ranks are unknown."""
    return []


def _gather_equal_tensors(gathered: list[Tensor], tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    for each in gathered:
        each.copy_(tensor)
