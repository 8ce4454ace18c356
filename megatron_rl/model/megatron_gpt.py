"""The policy as megatron-core's own GPTModel, whose forward megatron-core's engine needs."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel

from megatron_rl.model.core_config import transformer_config
from megatron_rl.model.layer_specs import plain_block_spec
from megatron_rl.model.policy import Policy
from megatron_rl.model.rotation import frequencies
from megatron_rl.recipe.model import ModelConfig


def megatron_gpt(policy: Policy, model: ModelConfig) -> GPTModel:
    """Build megatron-core's GPTModel, for inference, with the policy's own parameters: it follows training, and takes
    no further memory.

    policy: dense, without pipeline or sequence parallelism.
    """
    config = transformer_config(model, policy.kernels, policy.pg_collection)
    config.fp8 = None  # generation is in the model's dtype, see `Policy.without_fp8`
    config.use_cpu_initialization = True  # otherwise it allocates on the GPU, whatever the default device
    config.perform_initialization = False
    with torch.device("meta"):
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=plain_block_spec(config, policy.adapters),
            vocab_size=policy.vocab_size,
            max_sequence_length=policy.max_sequence_length,
            parallel_output=True,
            share_embeddings_and_output_weights=model.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=model.rope_base,
            pg_collection=policy.pg_collection,
        )
    for name, module in gpt.named_modules():
        for weight, mine in module._parameters.items():
            if mine is not None:
                module._parameters[weight] = policy.get_parameter(f"{name}.{weight}")
    gpt.rotary_pos_emb.inv_freq = frequencies(model, policy.device)  # scaled, if the model's are
    return gpt.eval()
