"""megatron-core's DDP and Adam, a pure learning-rate schedule, and one guarded update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_rl.config import Model, Optimizer
from megatron_rl.training.model import DTYPES, Policy


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did."""

    grad_norm: float
    """Of the whole model, before clipping."""
    learning_rate: float
    applied: bool
    """False where the gradient was not finite: weights and Adam's state are as before."""


class PolicyOptimizer:
    """The policy under data parallelism: gradients are summed over ranks, the caller weights the loss."""

    def __init__(self, policy: Policy, model: Model, config: Optimizer, total_updates: int) -> None:
        self.config = config
        self.total_updates = total_updates
        self.ddp = DistributedDataParallel(
            policy.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=config.grad_reduce_in_fp32, use_distributed_optimizer=config.distributed
            ),
            policy,
        )
        dtype = DTYPES[model.dtype]
        self.megatron: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.epsilon,
                clip_grad=config.clip_grad,
                params_dtype=dtype,
                bf16=dtype is torch.bfloat16,
                use_distributed_optimizer=config.distributed,
            ),
            [self.ddp],
        )
        for part in self._parts():
            if isinstance(part, DistributedOptimizer):
                _keep_step(part)
            if isinstance(part.optimizer, torch.optim.Adam):  # neither Transformer Engine's nor Apex's, both fused
                for group in part.optimizer.param_groups:
                    group["fused"] = True

    def _parts(self) -> list[Any]:
        return self.megatron.chained_optimizers

    def zero_grad(self) -> None:
        self.ddp.zero_grad_buffer()
        self.megatron.zero_grad()

    def update(self, updates_done: int) -> Update:
        """Sum the gradients over the data-parallel ranks and step, unless they are not finite. Collective."""
        finalize_model_grads([self.ddp])
        rate = learning_rate(updates_done, self.total_updates, self.config)
        overflow = self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        if overflow or not math.isfinite(grad_norm):
            return Update(grad_norm, rate, applied=False)
        if self.config.clip_grad > 0:
            for part in self._parts():
                clip_grad_by_total_norm_fp32(part.get_parameters(), self.config.clip_grad, grad_norm)
        for group in self.megatron.param_groups:
            group["lr"] = rate
            # megatron-core leaves this to its scheduler, which is not used here: norms and biases do not decay.
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        self.megatron.step_with_ready_grads()
        return Update(grad_norm, rate, applied=True)

    def sharded_state(self, model_state: dict[str, Any], *, loading: bool) -> dict[str, Any]:
        """Adam's state in megatron-core's sharded form; loads into any number of data-parallel ranks."""
        if loading:
            for part in self._parts():
                if isinstance(part, DistributedOptimizer):
                    # Without a `step` per parameter, which torch's Adam makes in its first update, there is
                    # nothing to load into.
                    part._init_optimizer_states_with_dummy_values()
        # Every rank saves its own shards: no communication, no gathering on one rank.
        return self.megatron.sharded_state_dict(
            model_state, is_loading=loading, metadata={"distrib_optim_sharding_type": "dp_reshardable"}
        )

    @torch.no_grad()  # the shards are views of the weights
    def load_state(self, state: dict[str, Any]) -> None:
        self.megatron.load_state_dict(state)
        for part in self._parts():
            unshare_step(part.optimizer)


def learning_rate(updates_done: int, total_updates: int, config: Optimizer) -> float:
    """Rate of the next update: linear warm-up over `warmup_steps`, then `decay` to `min_learning_rate` at the end."""
    if updates_done < config.warmup_steps:
        return config.learning_rate * (updates_done + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.learning_rate
    passed = (updates_done - config.warmup_steps) / max(1, total_updates - config.warmup_steps)
    left = 1 - min(1.0, passed)
    factor = left if config.decay == "linear" else (1 - math.cos(math.pi * left)) / 2
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * factor


def unshare_step(adam: torch.optim.Optimizer) -> None:
    """Give every parameter its own `step`.

    Without Transformer Engine and Apex, DistributedOptimizer.load_state_dict (0.16.1 and 0.19.2) hands torch's
    Adam one `step` tensor for all parameters, which Adam then increments once per parameter and update.
    """
    for state in adam.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()


def _keep_step(part: DistributedOptimizer) -> None:
    """Let shards load without touching `step`, which torch's Adam keeps per parameter and megatron-core saves once
    per parameter group: `_set_main_param_and_optimizer_states` (0.16.1 and 0.19.2) copies it from the shard too,
    which has none (KeyError) or that of the process that loads."""
    original = part._set_main_param_and_optimizer_states

    def load(model_param: torch.nn.Parameter, tensors: dict[str, Tensor]) -> None:
        group, order = part.model_param_group_index_map[model_param]
        main_param = part.optimizer.param_groups[group]["params"][order]
        state = part.optimizer.state[main_param]
        original(model_param, {**tensors, "step": state["step"]} if "step" in state else tensors)

    part._set_main_param_and_optimizer_states = load
