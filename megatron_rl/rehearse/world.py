"""A rank of a world whose other ranks are not there: collectives return at once, and change nothing."""

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
from megatron_rl.refit import reshard
from megatron_rl.rehearse.routing import balanced_routing

# Those of c10d's operations that have no kernel for tensors without numbers (torch 2.13).
_WITHOUT_KERNEL = ("reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_")


@contextmanager
def alone_in(world: int, rank: int, layout: TrainingLayout) -> Iterator[Groups]:
    """The groups of one rank of a world of this size, as `rank.groups.connect` would make them."""
    library = torch.library.Library("c10d", "IMPL")
    for name in _WITHOUT_KERNEL:
        library.impl(name, lambda *_: FakeWork().boxed(), "Meta")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with (
            mock.patch.object(dist, "all_gather_object", _all_say_the_same),
            mock.patch.object(dist, "all_gather", _all_have_the_same),
            mock.patch.object(reshard, "plan_moves", _nothing_moves),
            balanced_routing(),
        ):
            yield cut(layout, timedelta(minutes=1))
    finally:
        disconnect()


def _all_say_the_same(gathered: list[Any], said: Any, group: dist.ProcessGroup | None = None) -> None:
    gathered[:] = [said] * len(gathered)


def _nothing_moves(held: Any, needed: Any) -> list[Any]:
    """What other ranks hold is not known here."""
    return []


def _all_have_the_same(gathered: list[Tensor], tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    for each in gathered:
        each.copy_(tensor)
