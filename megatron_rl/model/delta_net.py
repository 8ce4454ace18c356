"""Gated delta net (arXiv 2412.06464), the linear attention of Qwen3-Next and Qwen3.5, on packed tokens.

Modules have the names of megatron-core's GatedDeltaNet, which needs a GPU, knows no packed sequences and no context
parallelism. The rows of `in_proj` and `conv1d` are ordered by key heads, so that tensor-parallel ranks split them at
any number that divides the key heads:

    in_proj   [..., hidden]        for each key head: query, key, then of its value heads: value, gate, beta, decay
    conv1d    [..., 1, kernel]     for each key head: query, key, then the values of its value heads
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor
from torch.nn import Conv1d, Parameter
from torch.nn.functional import pad, rms_norm, silu, softplus

from megatron_rl.model.kept_precision import KeptPrecision
from megatron_rl.model.lora import Adapters
from megatron_rl.model.platform.delta_rule import ConsecutiveSequences, DeltaKernels
from megatron_rl.model.platform.device import Linears
from megatron_rl.model.platform.paths import DeltaState, RecurrentLayout
from megatron_rl.recipe.model_parts import DeltaNet


@dataclass(frozen=True, slots=True)
class DeltaSubmodules:
    in_proj: type
    out_proj: type


class GatedDelta(KeptPrecision, MegatronModule):
    # bf16 would change the decay of a token, exp(A_log), by up to 0.8 %. vLLM and SGLang have it in fp32, and so is
    # Qwen3.5 published. vLLM would round dt_bias and the norm to the model's dtype, so these are in it here, too.
    kept = ("A_log",)

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaSubmodules,
        layer_number: int,
        sizes: DeltaNet,
        kernels: DeltaKernels,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number, self.sizes, self.kernels = layer_number, sizes, kernels
        self._tensor = pg_collection.tp
        ranks = self._tensor.size()
        self.key_heads, self.value_heads = sizes.key_heads // ranks, sizes.value_heads // ranks
        per_key = sizes.value_heads // sizes.key_heads
        values = per_key * sizes.value_head_dim
        self._parts = (2 * sizes.key_head_dim + values, values, per_key, per_key)  # of a key head in in_proj
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": self._tensor}
        self.in_proj = submodules.in_proj(
            config.hidden_size,
            sizes.key_heads * sum(self._parts),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        self.out_proj = submodules.out_proj(
            sizes.value_heads * sizes.value_head_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )
        channels = self.key_heads * self._parts[0]
        self.conv1d = Conv1d(channels, channels, sizes.conv_kernel, groups=channels, bias=False)
        self.dt_bias = Parameter(torch.ones(self.value_heads))
        self.A_log = Parameter(torch.empty(self.value_heads))
        self.out_norm = torch.nn.RMSNorm(sizes.value_head_dim, eps=config.layernorm_epsilon)
        for weight in (self.conv1d.weight, self.dt_bias, self.A_log):
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]  # for the norm of gradients
        if config.perform_initialization:
            self._initialize()

    def _initialize(self) -> None:
        """Draw the weights of all heads, and keep those of this rank."""
        rank, ranks = self._tensor.rank(), self._tensor.size()
        bound = self.sizes.conv_kernel**-0.5
        for weight, low, high in ((self.conv1d.weight, -bound, bound), (self.A_log, 1.0, 16.0)):
            whole = weight.new_empty(len(weight) * ranks, *weight.shape[1:]).uniform_(low, high)
            weight.data.copy_(whole.chunk(ranks)[rank])
        self.A_log.data.log_()

    def empty_state(self, sequences: int) -> DeltaState:
        weight, sizes = self.conv1d.weight, self.sizes
        history = weight.new_zeros(sequences, weight.shape[2] - 1, len(weight))
        memory = weight.new_zeros(
            sequences, self.value_heads, sizes.key_head_dim, sizes.value_head_dim, dtype=torch.float32
        )
        return DeltaState(history, memory)

    def forward(self, hidden: Tensor, rotation: Any, layout: RecurrentLayout) -> Tensor:
        """Mix the tokens, [tokens, 1, hidden] -> the same; see `PackedAttention.forward` for parts and padding."""
        mixed = self.in_proj(hidden)[0].squeeze(1)
        padding = len(mixed) - len(rotation.cosines)
        out = layout.recur(self.layer_number, mixed[:-padding] if padding else mixed, self._recurrence)
        out, _bias = self.out_proj(pad(out, (0, 0, 0, padding))[:, None])
        return out

    def _recurrence(
        self, mixed: Tensor, sequences: ConsecutiveSequences, state: DeltaState | None
    ) -> tuple[Tensor, DeltaState]:
        """Compute all but the two projections: [tokens, rows of in_proj] -> [tokens, heads * value_size]"""
        history, memory = (None, None) if state is None else (state.history, state.memory)
        sizes = self.sizes
        qkv, gate, beta, decay = mixed.unflatten(1, (self.key_heads, -1)).split(self._parts, dim=-1)
        qkv, history = self.kernels.convolved(qkv.flatten(1), self.conv1d.weight.squeeze(1), sequences, history)
        query, key, value = qkv.unflatten(1, (self.key_heads, -1)).split(
            (sizes.key_head_dim, sizes.key_head_dim, self._parts[1]), dim=-1
        )
        value, gate = (each.reshape(len(each), self.value_heads, -1) for each in (value, gate))
        decay = -self.A_log.exp() * softplus(decay.flatten(1).float() + self.dt_bias.float())
        beta = beta.flatten(1).sigmoid()
        out, memory = self.kernels.delta_rule((query, key, value), decay, beta, sequences, memory)
        return self._normed(out, gate).flatten(1), DeltaState(history, memory)

    def _normed(self, out: Tensor, gate: Tensor) -> Tensor:
        """Normalise each head, [tokens, heads, value_size], and multiply it by silu(gate). Ranks share the weight, and
        each has some of the heads that its gradient is the sum of."""
        weight = self.out_norm.weight
        if self._tensor.size() > 1:
            weight = copy_to_tensor_model_parallel_region(weight, group=self._tensor)
        normed = rms_norm(out.float(), weight.shape, eps=self.out_norm.eps).to(out.dtype) * weight
        return (normed * silu(gate.float())).to(out.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, module in (("in_proj", self.in_proj), ("out_proj", self.out_proj)):
            found |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self._tensor
            )
        own = {name: weight for name, weight in self.named_parameters() if "_proj." not in name}
        split = {name: 0 for name in own if name != "out_norm.weight"}
        return found | make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            split,
            sharded_offsets,
            tp_group=self._tensor,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


def delta_spec(sizes: DeltaNet, kernels: DeltaKernels, linears: Linears, adapters: Adapters | None) -> ModuleSpec:
    """Specification of a gated delta net in the place of a layer's attention."""
    kinds = {"in_proj": linears.column, "out_proj": linears.row}
    if adapters:
        kinds = {name: adapters.adapted(f"self_attention.{name}", kind) for name, kind in kinds.items()}
    return ModuleSpec(GatedDelta, {"sizes": sizes, "kernels": kernels}, DeltaSubmodules(**kinds))
