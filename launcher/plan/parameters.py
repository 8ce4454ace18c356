"""Number of parameters of a model, and of those that one rank holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config import RunConfig
from megatron_rl.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of parameters on one rank."""

    dense: int
    """Parameters outside experts, which all data-parallel ranks hold."""
    experts: int
    """Parameters of the rank's experts."""

    @property
    def all(self) -> int:
        return self.dense + self.experts


def tokens_known(config: RunConfig) -> int | None:
    """Rows of the embedding without padding; None if only the tokenizer knows."""
    tokenizer = config.tokenizer
    return config.model.vocab_size or (len(tokenizer.alphabet) + 2 if tokenizer.type == "characters" else None)


def vocabulary(config: RunConfig) -> int | None:
    """Rows of the embedding, padding included; None if only the tokenizer knows."""
    tokens = tokens_known(config)
    return None if tokens is None else config.model.padded_vocab_size(tokens)


def weights(model: ModelConfig, vocab: int, tp: int = 1, pp: int = 1, ep: int = 1, stage: int = 0) -> Weights:
    """Count the parameters of one rank, or of the whole model if all sizes are 1.

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
    if last and not (model.tied_embeddings and first):  # the first and the last stage each hold a copy of a tied table
        ends += table
    return Weights(dense=layers * layer + ends, experts=layers * experts)
