"""megatron-core's configuration of a model."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from megatron_rl.model.activation import activation_fields
from megatron_rl.model.platform.device import Kernels
from megatron_rl.recipe.job import StageEnds
from megatron_rl.recipe.model import ModelConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def transformer_config(
    model: ModelConfig,
    kernels: Kernels,
    groups: ProcessGroupCollection,
    *,
    sequence_parallel: bool = False,
    stage_ends: StageEnds = (None, None),
) -> TransformerConfig:
    dtype = DTYPES[model.dtype]
    experts: dict[str, Any] = {}
    if model.num_experts is not None:
        experts = {
            "num_moe_experts": model.num_experts,
            "moe_router_topk": model.experts_per_token,
            "moe_ffn_hidden_size": model.expert_ffn_hidden_size,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_pre_softmax": model.experts_per_token == 1,  # megatron-core refuses one expert otherwise
            "moe_shared_expert_intermediate_size": model.shared_expert_ffn_hidden_size,
            "moe_shared_expert_gate": model.shared_expert_gate,
        }
    if not model.equal_layers:  # megatron-core then saves each layer by its number
        experts["moe_layer_freq"] = [int(model.has_experts(number)) for number in range(model.num_layers)]
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.layernorm_epsilon,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        # megatron-core takes gradients of norms of queries and keys for parts of a sum over tensor-parallel ranks.
        qk_layernorm=model.qk_norm and model.qk_norm_of == "head",
        layernorm_zero_centered_gamma=model.zero_centered_norms,
        attention_output_gate=model.attention_gate,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,  # DDP sums gradients: the loss is already weighted for the global batch
        tensor_model_parallel_size=groups.tp.size(),
        pipeline_model_parallel_size=groups.pp.size(),
        num_layers_in_first_pipeline_stage=stage_ends[0],
        num_layers_in_last_pipeline_stage=stage_ends[1],
        context_parallel_size=groups.cp.size(),
        expert_model_parallel_size=groups.ep.size(),
        expert_tensor_parallel_size=groups.expt_tp.size(),
        sequence_parallel=sequence_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **activation_fields(model),
        **experts,
        **kernels.transformer_overrides,
    )
