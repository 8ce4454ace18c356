"""What a model's tokens need of arithmetic and memory, by formula."""

from __future__ import annotations

from megatron_rl.model.config import ModelConfig


def training_flops(model: ModelConfig, vocabulary: int, *, tokens: int, pairs: int, predictions: int) -> float:
    """Floating-point operations of a forward and a backward pass, two per multiply-add: products with weights and
    attention, nothing else, and nothing twice that is recomputed to save memory (model FLOPs, arXiv 2204.02311,
    appendix B). The backward pass takes twice the forward one:

        3 (2 layers tokens (qkv + out + ffn) + 4 layers heads head_size pairs + 2 hidden vocabulary predictions)

        qkv = hidden (heads + 2 query groups) head_size    out = heads head_size hidden    ffn = 3 hidden ffn_hidden,
        or, of a token in a layer of experts, 3 hidden expert_ffn_hidden experts_per_token + hidden experts

    Args:
        vocabulary: rows of the output layer.
        tokens: packed tokens; what several answers share counts once.
        pairs: of a packed token and one that it attends to, itself among them.
        predictions: tokens whose logits are needed.
    """
    heads, groups, hidden = model.num_attention_heads, model.num_query_groups, model.hidden_size
    attention = hidden * (2 * heads + 2 * groups) * model.head_size
    ffn = 3 * hidden * model.ffn_hidden_size
    if model.num_experts and model.experts_per_token and model.expert_ffn_hidden_size:
        ffn = 3 * hidden * model.expert_ffn_hidden_size * model.experts_per_token + hidden * model.num_experts
    layer = 2 * (attention + ffn) * tokens + 4 * heads * model.head_size * pairs
    return 3.0 * (model.num_layers * layer + 2 * hidden * vocabulary * predictions)


def rows_per_token(model: ModelConfig) -> int:
    """How many rows that attention gathers need as much memory as one packed token. A row keeps for the backward pass
    query, key, value and result, and a sum in fp32 for each head; a token at least what `recompute: selective` leaves
    of a layer: inputs of the norms; a row, and the result as it is packed; the first output of the feed-forward
    network, of experts their input and output, and of what is between them the product too.

        row = (2 heads + 2 query groups) head_size + 2 heads
        token = 2 hidden + row + heads head_size + 2 ffn_hidden

    In the shipped recipes for GPUs that is between 3 and 7.
    """
    heads, groups, head_size = model.num_attention_heads, model.num_query_groups, model.head_size
    if model.experts_per_token and model.expert_ffn_hidden_size:
        feed_forward = model.experts_per_token * (2 * model.hidden_size + 3 * model.expert_ffn_hidden_size)
    else:
        feed_forward = 2 * model.ffn_hidden_size
    row = (2 * heads + 2 * groups) * head_size + 2 * heads
    token = 2 * model.hidden_size + row + heads * head_size + feed_forward
    return token // row
