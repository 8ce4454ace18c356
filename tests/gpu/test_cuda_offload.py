"""Adam's state moves to host memory and back bit for bit, and its GPU memory is free meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_helpers import DEVICE, NEEDS_GPU
from offload_helpers import UPDATES, adams_numbers, an_optimizer, one_update

pytestmark = NEEDS_GPU

MIB = 2**20
NARROW = {"hidden_size": 64, "ffn_hidden_size": 96}
WIDE = {"hidden_size": 1024, "ffn_hidden_size": 4096}


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_updates_are_the_same_with_off_load(platform: Any, groups: Any, dtype: str, *, distributed: bool) -> None:
    """Gradients are random, not computed: on a GPU those differ from run to run."""
    usual, offloaded = (
        an_optimizer(platform, dtype, each, model=NARROW, distributed=distributed) for each in ("none", "optimizer")
    )
    offloaded.offload()
    for number in range(UPDATES):
        for optimizer in (usual, offloaded):
            one_update(optimizer, number)
    weights = [list(optimizer.ddp.module.parameters()) for optimizer in (usual, offloaded)]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    expected, found = adams_numbers(usual), adams_numbers(offloaded)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU does not count what it holds")
def test_gpu_memory_is_free_meanwhile_and_host_memory_is_pinned(platform: Any, groups: Any) -> None:
    optimizer = an_optimizer(platform, "bf16", "optimizer", model=WIDE)
    gradients = sum(buffer.grad_data.nbytes for buffer in optimizer.ddp.buffers)
    before = torch.cuda.memory_allocated()
    optimizer.offload()
    away = torch.cuda.memory_allocated()
    assert before - away == pytest.approx(optimizer.host_bytes + gradients, abs=MIB)
    assert optimizer.host_bytes > 100 * MIB
    assert all(piece.data.is_pinned() for name, piece in state(optimizer).items() if "exp_avg" in name)
    optimizer.zero_grad()
    optimizer.reload()
    assert torch.cuda.memory_allocated() == pytest.approx(before, abs=MIB)


def state(optimizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = optimizer.sharded_state(optimizer.ddp.module.sharded_state_dict())
    return {name: piece for name, piece in found.items() if name != "step"}
