"""Transports of tensors between worlds."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch

from megatron_rl.platform.transport import offered


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
