"""An optimizer on any device and in any memory, with gradients that depend only on the number of the update."""

from __future__ import annotations

from typing import Any

import torch
from core_helpers import tiny_model, tiny_policy
from torch import Tensor

from megatron_rl.learn.training.optimizer import PolicyOptimizer
from megatron_rl.recipe.job import Offload
from megatron_rl.recipe.training import OptimizerConfig

UPDATES = 4


def an_optimizer(platform: Any, dtype: str, offload: Offload, **fields: Any) -> PolicyOptimizer:
    """fields: values of OptimizerConfig, and `model`: fields of the model."""
    model = tiny_model(dtype=dtype, **fields.pop("model", {}))
    config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, **fields)
    return PolicyOptimizer(tiny_policy(platform, model), model, config, UPDATES, offload)


def one_update(optimizer: PolicyOptimizer, number: int) -> None:
    optimizer.zero_grad()
    loss = torch.zeros(())
    for index, weight in enumerate(optimizer.ddp.module.parameters()):
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1000 * number + index))
        loss = loss + (weight * noise.to(weight.device)).sum().cpu()
    loss.backward()
    optimizer.reload()
    optimizer.update(number)
    optimizer.offload()


def state_of(optimizer: PolicyOptimizer) -> dict[str, Any]:
    model = optimizer.ddp.module.sharded_state_dict()
    return {"model": model, "optimizer": optimizer.sharded_state(model)}


def adams_numbers(optimizer: PolicyOptimizer) -> dict[str, Tensor]:
    """Adam's state, copied to the CPU."""
    state = state_of(optimizer)["optimizer"]
    assert state.pop("step") == UPDATES
    return {name: piece.data.cpu().clone() for name, piece in state.items()}
