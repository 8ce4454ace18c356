"""Pure: how many parameters a model has, and how many of them a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config import RunConfig
from megatron_rl.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of parameters that a rank holds."""

    dense: int
    """Shared by all data-parallel ranks."""
    experts: int
    """Those of its experts."""

    @property
    def all(self) -> int:
        """Shared and experts' together."""
        return self.dense + self.experts


def tokens_known(config: RunConfig) -> int | None:
    """Rows of the embedding without padding; None where only the tokenizer knows."""
    tokenizer = config.tokenizer
    return config.model.vocab_size or (len(tokenizer.alphabet) + 2 if tokenizer.type == "characters" else None)


def vocabulary(config: RunConfig) -> int | None:
    """Rows of the embedding, padding included; None where only the tokenizer knows."""
    tokens = tokens_known(config)
    return None if tokens is None else config.model.padded_vocab_size(tokens)


def weights(model: ModelConfig, vocab: int, tp: int = 1, pp: int = 1, ep: int = 1, stage: int = 0) -> Weights:
    """Parameters of one rank; of the whole model where all sizes are 1.

    Args:
        vocab: rows of the embedding, padding included.
        stage: pipeline stage of the rank.
    """
    hidden, heads, groups, head = model.hidden_size, model.num_attention_heads, model.num_query_groups, model.head_size
    qkv = (heads + 2 * groups) * head
    layer = (hidden * qkv + heads * head * hidden) // tp + 2 * hidden
    layer += qkv // tp * model.qkv_bias + 2 * head * model.qk_norm
    experts = 0
    if model.num_experts:
        layer += hidden * model.num_experts
        experts = model.num_experts // ep * 3 * hidden * (model.expert_ffn_hidden_size or 0) // tp
    else:
        layer += 3 * hidden * model.ffn_hidden_size // tp
    layers = model.num_layers // pp
    table = vocab // tp * hidden
    first, last = stage == 0, stage == pp - 1
    ends = table * first + last * hidden
    if last and not (model.tied_embeddings and first):  # a shared table is there once on each of the two stages
        ends += table
    return Weights(dense=layers * layer + ends, experts=layers * experts)


def whole_model(model: ModelConfig, vocab: int) -> int:
    """Parameters of the model."""
    return weights(model, vocab).all
