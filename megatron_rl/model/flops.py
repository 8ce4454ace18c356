"""Arithmetic that a model needs, by formula."""

from __future__ import annotations

from megatron_rl.model.config import ModelConfig


def training_flops(model: ModelConfig, vocabulary: int, *, tokens: int, pairs: int, predictions: int) -> float:
    """Floating-point operations of a forward and a backward pass, two per multiply-add: products with weights and
    attention, nothing else, and nothing twice that is recomputed to save memory (model FLOPs, arXiv 2204.02311,
    appendix B). The backward pass takes twice the forward one:

        3 (2 layers tokens (qkv + out + ffn) + 4 layers heads head_size pairs + 2 hidden vocabulary predictions)

        qkv = hidden (heads + 2 query groups) head_size    out = heads head_size hidden    ffn = 3 hidden ffn_hidden

    Args:
        vocabulary: rows of the output layer.
        tokens: packed tokens; what several answers share counts once.
        pairs: of a packed token and one that it attends to, itself among them.
        predictions: tokens whose logits are needed.
    """
    heads, groups, hidden = model.num_attention_heads, model.num_query_groups, model.hidden_size
    attention = hidden * (2 * heads + 2 * groups) * model.head_size
    layer = 2 * (attention + 3 * hidden * model.ffn_hidden_size) * tokens + 4 * heads * model.head_size * pairs
    return 3.0 * (model.num_layers * layer + 2 * hidden * vocabulary * predictions)
