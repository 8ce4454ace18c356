"""megatron-core's DDP and Adam, with a learning-rate schedule and updates that skip non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from torch import Tensor

from megatron_rl.learn.training import overlap
from megatron_rl.learn.training.adam_state import (
    adam_tensors,
    begin,
    get_step,
    set_step,
    sharded_adam_state,
    updated_weights,
)
from megatron_rl.learn.training.offload import HostState, Unused
from megatron_rl.model.core_config import DTYPES
from megatron_rl.model.platform.megatron_patches import skip_copies
from megatron_rl.model.policy import Policy
from megatron_rl.model.router import balance_experts, forget_tokens
from megatron_rl.recipe.job import Offload
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.training import OptimizerConfig, learning_rate


@dataclass(frozen=True, slots=True)
class Update:
    grad_norm: float  # norm over the whole model, before clipping
    learning_rate: float
    applied: bool  # false if the gradient was not finite: weights and Adam's state are unchanged


class PolicyOptimizer:
    """Optimizer of the policy under data parallelism. Sums gradients over ranks; the caller weights the loss. Calls:

    zero_grad   forward and backward passes   reload   update   offload   ...   overlap.finish_gathering
    """

    def __init__(
        self,
        policy: Policy,
        model: ModelConfig,
        config: OptimizerConfig,
        total_updates: int,
        offload: Offload = "none",
    ) -> None:
        """offload: state that `offload` takes off the device. All state starts on the device."""
        self.config = config
        self.total_updates = total_updates
        accumulators = overlap.add_in_place(policy)
        self.ddp = DistributedDataParallel(
            policy.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=config.grad_reduce_in_fp32,
                use_distributed_optimizer=config.distributed,
                overlap_grad_reduce=config.overlap_grad_reduce,
                overlap_param_gather=config.overlap_param_gather,
                bucket_size=overlap.BUCKET_WEIGHTS,
            ),
            policy,
        )
        del accumulators  # DDP has them now
        self.overlap = overlap.Overlap(self.ddp)
        dtype = DTYPES[model.dtype]
        self.megatron: Any = get_megatron_optimizer(
            MegatronOptimizerConfig(
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
                overlap_param_gather=config.overlap_param_gather,
            ),
            [self.ddp],
            use_gloo_process_groups=False,
        )
        for part in self._parts():
            if isinstance(part.optimizer, torch.optim.Adam):  # Transformer Engine's and Apex's are always fused
                for group in part.optimizer.param_groups:
                    group["fused"] = True
            begin(part.optimizer)
        self._ahead = self._updated_ahead(policy) if model.trains_prediction else None
        skip_copies(self.ddp, self._parts(), dtype)
        gradients = [buffer.grad_data for buffer in (*self.ddp.buffers, *self.ddp.expert_parallel_buffers)]
        self._gradients = Unused(gradients) if offload != "none" else None
        self._host: HostState | None = None
        if offload == "optimizer":
            tensors = chain.from_iterable(adam_tensors(part, policy.parameters()) for part in self._parts())
            self._host = HostState([*tensors], policy.platform)

    def _parts(self) -> list[Any]:
        return self.megatron.chained_optimizers

    def _updated_ahead(self, policy: Policy) -> frozenset[int]:
        """Identities of the tensors that Adam updates for the prediction layer; none on ranks without it."""
        weights = [] if policy.prediction is None else [*policy.prediction.parameters()]
        known, parts = {*map(id, weights)}, self._parts()
        found = chain.from_iterable(updated_weights(part, weights) for part in parts)
        return frozenset(id(updated) for weight, updated, _ in found if id(weight) in known)

    @property
    def host_bytes(self) -> int:
        return self._host.bytes if self._host else 0

    def offload(self) -> None:
        """Take off the device what is unused until the next update, as configured: gradient buffers, whose values are
        dropped, and Adam's state and fp32 weights."""
        if self._gradients:
            self.megatron.zero_grad()  # some gradients are views of the buffers, the others copies
            self._gradients.release()
        if self._host:
            self._host.offload()

    def reload(self) -> None:
        if self._host and self._host.away:
            self._host.reload()

    def zero_grad(self) -> None:
        if self._gradients:
            self._gradients.restore()
        self.ddp.zero_grad_buffer()
        self.megatron.zero_grad()
        forget_tokens(self.ddp.module)

    def update(self, updates_done: int) -> Update:
        """Sum the gradients over the data-parallel ranks and step if they are finite. Collective."""
        self.overlap.reduce_rest()
        finalize_model_grads([self.ddp])
        rate = learning_rate(updates_done, self.total_updates, self.config)
        overflow = self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        ahead_norm = 0.0 if self._ahead is None else self._norm_ahead(self._ahead)
        if overflow or not math.isfinite(grad_norm + ahead_norm):
            return Update(grad_norm if math.isfinite(ahead_norm) else ahead_norm, rate, applied=False)
        if self.config.clip_grad > 0:
            for part in self._parts():
                ahead = [weight for weight in part.get_parameters() if id(weight) in (self._ahead or ())]
                own = [weight for weight in part.get_parameters() if id(weight) not in (self._ahead or ())]
                for weights, norm in ((own, grad_norm), (ahead, ahead_norm)):
                    if weights:
                        clip_grad_by_total_norm_fp32(weights, self.config.clip_grad, norm)
        for group in self.megatron.param_groups:
            group["lr"] = rate
            # megatron-core leaves this to its scheduler, which is not used: norms and biases do not decay.
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        self.megatron.step_with_ready_grads()
        balance_experts(self.ddp.module)
        return Update(grad_norm, rate, applied=True)

    def _norm_ahead(self, ahead: frozenset[int]) -> float:
        """Gradient norm of the prediction layer, which `get_grad_norm` leaves out, over all ranks. Collective."""
        squares = 0.0
        for part in self._parts():
            gradients = [
                weight.grad
                for weight in part.get_parameters()
                if id(weight) in ahead
                and weight.grad is not None
                and param_is_not_tensor_parallel_duplicate(weight, getattr(part, "tp_group", None))
            ]
            group = part.get_grad_stats_parallel_group()
            squares += float(get_grad_norm_fp32(gradients, grad_stats_parallel_group=group)) ** 2
        return math.sqrt(squares)

    def sharded_state(
        self, model_state: dict[str, Any], weight_held: Callable[[Tensor], Tensor] = lambda weight: weight
    ) -> dict[str, Any]:
        """Return Adam's state in megatron-core's sharded form, on the device or the host: see `sharded_adam_state`.

        weight_held: maps a weight to the tensor that holds its values now, as `model_state` has it.
        """

        def held(tensor: Tensor) -> Tensor:
            return weight_held(self._host.held(tensor) if self._host else tensor)

        state: dict[str, Any] = {"step": get_step(self._parts()[0].optimizer)}
        for part in self._parts():
            state |= sharded_adam_state(part, self.ddp.module.parameters(), model_state, held)
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from a loaded sharded state of this optimizer: loading filled all but the number of updates."""
        for part in self._parts():
            set_step(part.optimizer, state["step"])
