"""The tiny model of core_helpers.py in `transformers`, as an independent reference. The library takes seconds to
import, so only `witness` imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from core_helpers import PADDED_VOCAB
from torch import Tensor

from megatron_rl.model.policy import Policy
from megatron_rl.recipe.architectures.parts import written_scaling
from megatron_rl.recipe.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def witness(policy: Policy, model: ModelConfig) -> PreTrainedModel:
    """Build the model of `transformers` with this shape and the policy's weights: Qwen3, with or without experts, if
    queries and keys are normed; Llama without biases; otherwise Qwen2."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rope = rope_parameters(model)
    if model.num_experts is not None:
        extra = {
            "model_type": "qwen3_moe",
            "head_dim": model.head_size,
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.expert_ffn_hidden_size,
            "norm_topk_prob": True,
        }
    elif model.qk_norm:
        extra = {"model_type": "qwen3", "head_dim": model.head_size}
    elif not model.qkv_bias:
        extra = {"model_type": "llama", "head_dim": model.head_size}
    else:
        extra = {"model_type": "qwen2"}
    config = AutoConfig.for_model(
        vocab_size=PADDED_VOCAB,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        max_position_embeddings=model.max_position_embeddings,
        rms_norm_eps=model.layernorm_epsilon,
        rope_parameters=rope,
        tie_word_embeddings=model.tied_embeddings,
        attn_implementation="eager",
        **extra,
    )
    twin: PreTrainedModel = AutoModelForCausalLM.from_config(config).float()
    theirs = dict(twin.named_parameters())
    ours = in_their_names(policy, model, lambda weight: weight.detach().float())
    assert theirs.keys() == ours.keys()
    with torch.no_grad():
        for name, weight in theirs.items():
            weight.copy_(ours[name])
    return twin


def rope_parameters(model: ModelConfig) -> dict[str, Any]:
    """Rotary positions of a model in config.json of transformers 5."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_base}
    if model.partial_rotary_factor != 1:
        found["partial_rotary_factor"] = model.partial_rotary_factor
    if model.rope_scaling is not None:
        found |= written_scaling(model.rope_scaling)
    return found


def in_their_names(policy: Policy, model: ModelConfig, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return `of(parameter)`, a weight or its gradient, with the names and shapes of `transformers`."""
    ours = {name: of(weight) for name, weight in policy.named_parameters()}
    head = model.head_size
    per_group = model.num_attention_heads // model.num_query_groups
    theirs = {
        "model.embed_tokens.weight": ours["embedding.word_embeddings.weight"],
        "model.norm.weight": ours["decoder.final_layernorm.weight"],
    }
    if not model.tied_embeddings:
        theirs["lm_head.weight"] = ours["output_layer.weight"]
    for i in range(model.num_layers):
        layer, their_layer = f"decoder.layers.{i}", f"model.layers.{i}"
        theirs[f"{their_layer}.input_layernorm.weight"] = ours[f"{layer}.input_layernorm.weight"]
        theirs[f"{their_layer}.post_attention_layernorm.weight"] = ours[f"{layer}.pre_mlp_layernorm.weight"]
        theirs[f"{their_layer}.self_attn.o_proj.weight"] = ours[f"{layer}.self_attention.linear_proj.weight"]
        if model.num_experts is not None:
            experts = [f"{layer}.mlp.experts.local_experts.{number}" for number in range(model.num_experts)]
            theirs[f"{their_layer}.mlp.gate.weight"] = ours[f"{layer}.mlp.router.weight"]
            for name, linear in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
                stacked = torch.stack([ours[f"{expert}.{linear}.weight"] for expert in experts])
                theirs[f"{their_layer}.mlp.experts.{name}"] = stacked
        else:
            theirs[f"{their_layer}.mlp.down_proj.weight"] = ours[f"{layer}.mlp.linear_fc2.weight"]
            gate, up = ours[f"{layer}.mlp.linear_fc1.weight"].chunk(2)
            theirs[f"{their_layer}.mlp.gate_proj.weight"], theirs[f"{their_layer}.mlp.up_proj.weight"] = gate, up
        # megatron-core keeps each group's query heads, key and value together.
        for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
            qkv = ours[f"{layer}.self_attention.linear_qkv.{kind}"]
            grouped = qkv.view(model.num_query_groups, (per_group + 2) * head, -1)
            q, k, v = (part.reshape(-1, *qkv.shape[1:]) for part in grouped.split([per_group * head, head, head], 1))
            theirs[f"{their_layer}.self_attn.q_proj.{kind}"] = q
            theirs[f"{their_layer}.self_attn.k_proj.{kind}"] = k
            theirs[f"{their_layer}.self_attn.v_proj.{kind}"] = v
        if model.qk_norm:
            theirs[f"{their_layer}.self_attn.q_norm.weight"] = ours[f"{layer}.self_attention.q_layernorm.weight"]
            theirs[f"{their_layer}.self_attn.k_norm.weight"] = ours[f"{layer}.self_attention.k_layernorm.weight"]
    return theirs
