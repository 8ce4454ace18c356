"""The same weights for both sides: a megatron-core policy as a Hugging Face Qwen2ForCausalLM."""

import torch
from torch import Tensor

from megatron_rl.model.policy import Policy
from megatron_rl.recipe.model import ModelConfig


def lengthen(policy: Policy, end_token: int, end_bias: float) -> None:
    """Give answers of a policy with random weights and tied embeddings long-tailed lengths.

    Channel 0 of every embedding is made large, so that it is large in the last hidden state for all tokens: about half
    the square root of the hidden size. The end token's output weight there is made smaller, which lowers its logit by
    some `end_bias` / 2 everywhere, so lengths are geometric. The end token is never an input, so nothing else changes.
    """
    weight = policy.embedding.word_embeddings.weight
    with torch.no_grad():
        weight[:, 0] = 1.0
        weight[end_token, 0] -= end_bias / weight.shape[1] ** 0.5


def as_qwen2(policy: Policy, model: ModelConfig, tokens: int) -> dict[str, Tensor]:
    """State dict of the equivalent Qwen2ForCausalLM, with tied embeddings of `tokens` rows.

    megatron-core interleaves query, key and value by query group, and stacks gate and up.
    """
    state = policy.state_dict()
    head_size = model.hidden_size // model.num_attention_heads
    heads = model.num_attention_heads // model.num_query_groups * head_size
    hugging_face = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"][:tokens],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
    }
    for index in range(model.num_layers):
        ours, theirs = f"decoder.layers.{index}.", f"model.layers.{index}."
        for kind in ("weight", "bias"):
            qkv = state[f"{ours}self_attention.linear_qkv.{kind}"]
            parts = qkv.unflatten(0, (model.num_query_groups, -1)).split([heads, head_size, head_size], dim=1)
            for name, part in zip("qkv", parts, strict=True):
                hugging_face[f"{theirs}self_attn.{name}_proj.{kind}"] = part.flatten(0, 1)
        hugging_face[f"{theirs}self_attn.o_proj.weight"] = state[f"{ours}self_attention.linear_proj.weight"]
        hugging_face[f"{theirs}input_layernorm.weight"] = state[f"{ours}input_layernorm.weight"]
        hugging_face[f"{theirs}post_attention_layernorm.weight"] = state[f"{ours}pre_mlp_layernorm.weight"]
        gate, up = state[f"{ours}mlp.linear_fc1.weight"].chunk(2)
        hugging_face[f"{theirs}mlp.gate_proj.weight"] = gate
        hugging_face[f"{theirs}mlp.up_proj.weight"] = up
        hugging_face[f"{theirs}mlp.down_proj.weight"] = state[f"{ours}mlp.linear_fc2.weight"]
    return {name: tensor.clone() for name, tensor in hugging_face.items()}
