"""Sums over tensor-parallel ranks in generation: the choice of memory, and torch's operator with its own signature."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from megatron_rl.model.platform import tensor_sum as module
from megatron_rl.model.platform.tensor_sum import CollectiveSum, OneRank, SymmetricSum, tensor_sum

CPU = torch.device("cpu")
RANKS = 4


class Group:
    """A group of ranks that all have the same tensors."""

    group_name = "a group"

    def size(self) -> int:
        return RANKS


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    calls: list[tuple[str, int]] = []

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        calls.append(("NCCL", tensor.numel()))
        if op is dist.ReduceOp.SUM:
            tensor.mul_(RANKS)

    def multimem(tensor: Tensor, op: str, name: str) -> Tensor:
        assert (op, name) == ("sum", Group.group_name)
        calls.append(("multicast", tensor.numel()))
        return tensor.mul_(RANKS)

    group: Any = Group()
    group.calls = calls
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(symmetric._SymmetricMemory, "has_multicast_support", lambda *_: True)
    monkeypatch.setattr(symmetric, "enable_symm_mem_for_group", lambda _: None)
    monkeypatch.setattr(symmetric, "empty", torch.empty)
    monkeypatch.setattr(symmetric, "rendezvous", lambda *_: SimpleNamespace(multicast_ptr=1))
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("multimem_all_reduce_", multimem, "CPU")
    yield group
    library._destroy()


def test_products_are_summed_in_mapped_memory_up_to_its_size(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SYMMETRIC_BYTES", 4 * 60)
    found = tensor_sum(group, torch.float32, CPU)
    assert isinstance(found, SymmetricSum)
    group.calls.clear()
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 7, generator=draw)
    for rows, way in ((3, "multicast"), (1, "multicast"), (4, "NCCL")):
        given = torch.randn(rows, 7, generator=draw)
        torch.testing.assert_close(found.product(given, weight), RANKS * given @ weight.T)
        assert group.calls.pop() == (way, rows * 20)
    assert group.calls == []


def test_all_ranks_choose_alike_and_say_why(
    group: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def assert_nccl(why: str) -> None:
        caplog.clear()
        found = tensor_sum(group, torch.float32, CPU)
        assert isinstance(found, CollectiveSum)
        assert [record.message for record in caplog.records] == [f"tensor-parallel sums of generation use NCCL: {why}"]
        given, weight = torch.ones(2, 3), torch.ones(5, 3)
        assert torch.equal(found.product(given, weight), torch.full((2, 5), 3.0 * RANKS))

    def fail(*_: Any) -> Any:
        raise RuntimeError("peer access is not supported\nbacktrace")

    with monkeypatch.context() as patch:
        patch.setattr(symmetric, "rendezvous", fail)
        assert_nccl("peer access is not supported")
    with monkeypatch.context() as patch:
        patch.setattr(symmetric, "rendezvous", lambda *_: SimpleNamespace(multicast_ptr=0))
        assert_nccl("the group's memory has no multicast address")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_all_agree", lambda *_: False)  # another rank has none
        assert_nccl("not all ranks have multicast")
    with monkeypatch.context() as patch:
        patch.setattr(symmetric._SymmetricMemory, "has_multicast_support", lambda *_: False)
        assert_nccl("this GPU has no multicast (NVSwitch of an H100 or later)")
    with monkeypatch.context() as patch:
        patch.setattr(symmetric._SymmetricMemory, "has_multicast_support", fail)
        assert_nccl("peer access is not supported")


def test_one_rank_sums_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = SimpleNamespace(size=lambda: 1)
    found = tensor_sum(group, torch.float32, CPU)
    assert isinstance(found, OneRank)
    assert torch.equal(found.product(torch.ones(2, 3), torch.ones(5, 3)), torch.full((2, 5), 3.0))
