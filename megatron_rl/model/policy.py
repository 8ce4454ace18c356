"""The policy: megatron-core's GPTModel on packed tokens."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_rl.errors import ConfigurationError
from megatron_rl.model.config import ModelConfig, Recompute
from megatron_rl.model.layers import Rotation, packed_layer_spec
from megatron_rl.platform.api import Platform
from megatron_rl.platform.attention import Layout, PackedSequences

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Policy(GPTModel):
    """GPTModel whose forward takes packed tokens with explicit positions and a layout.

    It keeps GPTModel's modules, names and sharded state; only the way data flows in differs: megatron-core's
    own forward counts positions from 0 along the sequence dimension, which packed tokens do not.
    """

    def forward(self, tokens: Tensor, positions: Tensor, layout: Layout, select: Tensor | None = None) -> Tensor:
        """Logits of the packed tokens in `select` (all where None).

        tokens, positions [tokens], select [selected] -> [selected, vocab] in the model's dtype, without the rows
        that pad the embedding: no token stands behind them.
        """
        hidden = self.embedding(tokens[None], positions[None])  # [tokens, 1, hidden]
        rotation = Rotation(self._cosines[positions], self._sines[positions])
        hidden = self.decoder(hidden, attention_mask=None, rotary_pos_emb=rotation, packed_seq_params=layout)
        if select is not None:
            hidden = self._platform.gather(hidden, select)  # answers that begin alike select the same token
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden, weight=weight)
        return logits.squeeze(1)[:, : self._tokens]

    @property
    def device(self) -> torch.device:
        return self._platform.device

    @property
    def tokens_between_looks(self) -> int:
        """See `Platform.tokens_between_looks`."""
        return self._platform.tokens_between_looks

    def layout(self, packed: PackedSequences) -> Layout:
        """The attention layout of whole sequences on the policy's device."""
        return self._platform.attention_layout(packed)

    def prepare(self, tokens: int, platform: Platform) -> None:
        """Note the platform and the size of the vocabulary without padding, and tabulate the rotations, [max positions,
        1, head size], computed in fp32 and kept in the model's dtype."""
        self._tokens, self._platform, device = tokens, platform, platform.device
        frequencies = self.rotary_pos_emb.inv_freq.float().to(device)
        angles = torch.outer(torch.arange(self.max_sequence_length, device=device).float(), frequencies)
        cosines, sines = angles.cos(), angles.sin()
        self._cosines = torch.cat((cosines, cosines), dim=-1)[:, None].to(self.config.params_dtype)
        self._sines = torch.cat((-sines, sines), dim=-1)[:, None].to(self.config.params_dtype)


def transformer_config(model: ModelConfig, platform: Platform) -> TransformerConfig:
    dtype = DTYPES[model.dtype]
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
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,  # DDP sums gradients: the loss is already weighted for the global batch
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **platform.transformer_overrides,
    )


def build_policy(model: ModelConfig, vocab_size: int, platform: Platform, recompute: Recompute = "none") -> Policy:
    """The policy with random weights (drawn from torch's generator) on the platform's device.

    vocab_size: the tokenizer's; see `ModelConfig.padded_vocab_size` for the embedding's.

    Raises ConfigurationError where the tokenizer has more tokens than `model.vocab_size`.
    """
    if model.vocab_size is not None and model.vocab_size < vocab_size:
        raise ConfigurationError(
            f"model.vocab_size {model.vocab_size} is less than the tokenizer's {vocab_size} tokens"
        )
    config = transformer_config(model, platform)
    policy = Policy(
        config=config,
        transformer_layer_spec=packed_layer_spec(config, recompute, platform),
        vocab_size=model.padded_vocab_size(vocab_size),
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rope_base,
        rope_scaling=model.rope_scaling is not None,
        rope_scaling_factor=model.rope_scaling or 1.0,
    )
    policy.to(device=platform.device, dtype=DTYPES[model.dtype])
    policy.prepare(vocab_size, platform)
    return policy
