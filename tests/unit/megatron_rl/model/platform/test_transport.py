"""Transports of tensors between worlds."""

from __future__ import annotations

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.model.platform.gpu_calls import offered
from megatron_rl.model.platform.transport import GlooTransport, NcclTransport


class Nccl:
    """A library of NCCL that the process has loaded."""

    def __init__(self, name: str, mode: int) -> None:
        assert (name, mode) == ("libnccl.so.2", os.RTLD_NOLOAD)

    def ncclGetVersion(self, number: Any) -> None:
        number._obj.value = 22703


def test_gloo_connects_whatever_its_release_is() -> None:
    assert offered("gloo") == "gloo"


def test_the_release_of_nccl_is_that_of_the_loaded_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", Nccl)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 26, 2))
    assert offered("nccl") == "nccl 2.27.3"


def test_the_release_of_nccl_is_that_of_torch_if_it_is_a_part_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, mode: int) -> None:
        raise OSError(f"{name} is not loaded")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    assert offered("nccl") == "nccl 2.29.7"


def test_nccl_between_worlds_is_watched_by_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's watchdog would end the process for the loss of a replica. The limit for NCCL to connect is read from the
    environment when torch waits, not when the backend is created: its own is half an hour."""
    seen, blocking = [], []

    class Backend:
        class Options:
            def __init__(self) -> None:
                self.config = SimpleNamespace()

        def __init__(self, *_: object) -> None:
            blocking.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))

        def eager_connect_single_device(self, device: torch.device) -> None:
            seen.append(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT"))

    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Backend, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(NcclTransport, "gather", lambda *_: [])
    store: Any = None
    NcclTransport(store, 0, 2, timedelta(minutes=2)).connect()
    assert seen == ["120"]
    assert blocking == ["1"]
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ, "the world's own backends are watched"


def test_a_rank_waits_over_tcp_for_one_that_is_late() -> None:
    """Weights of a large model take minutes, and ranks are not done with their parts at the same time."""
    store = torch.distributed.HashStore()

    def exchanged(rank: int) -> float:
        transport = GlooTransport(store, rank, 2, timedelta(seconds=1))
        transport.connect()
        content = torch.full((1,), float(rank))
        time.sleep(1.2 * rank)
        transport.exchange([(1, content)] if rank == 0 else [], [(0, content)] if rank == 1 else [])
        return content.item()

    with ThreadPoolExecutor() as pool:
        assert [*pool.map(exchanged, range(2))] == [0.0, 0.0]
