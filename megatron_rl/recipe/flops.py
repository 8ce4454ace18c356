"""Formulas for the arithmetic and memory that a model needs for its tokens, and the fullest micro-batch of them."""

from __future__ import annotations

from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.model import EXPERT_LINEARS, LoraConfig, ModelConfig


def fullest_microbatch(config: RunConfig, replicas: int) -> list[int]:
    """Return the lengths of the sequences in the fullest micro-batch: full ones, and a shorter one for the rest. It has
    at most the share of one of `replicas` data-parallel replicas. Plan and rehearsal both count it.

    Answers that share a prompt need no more memory (`rows_per_token`), nor do shorter answers, apart from padding to
    common lengths.
    """
    length = config.sequence_length
    limit = max(length, config.placement.training.cp * config.training.tokens_per_microbatch)
    lengths = [length] * (limit // length) + [limit % length] * (limit % length > 1)
    return lengths[: max(1, config.answers_of_replica(replicas))]


def training_flops(model: ModelConfig, vocabulary: int, *, tokens: int, pairs: int, predictions: int) -> float:
    """Floating-point operations of a forward and a backward pass, two per multiply-add. Counts products with weights
    and attention only, and recomputation not at all (model FLOPs, arXiv 2204.02311, appendix B). The backward pass
    takes twice the forward pass, except that weights which are not trained have no gradient: with adapters of rank r,
    products with weights count 2 instead of 3 times, and 3 times those with the adapters, r (inputs + outputs) each.

        3 (2 layers tokens (qkv + out + ffn) + 4 layers heads head_size pairs + 2 hidden vocabulary predictions)

        qkv = hidden (heads + 2 query groups) head_size    out = heads head_size hidden    ffn = 3 hidden ffn_hidden,
        or, per token in a layer of experts, 3 hidden expert_ffn_hidden experts_per_token + hidden experts

    Args:
        vocabulary: rows of the output layer.
        tokens: packed tokens; tokens shared by several answers count once.
        pairs: pairs of a packed token and one that it attends to, including itself.
        predictions: tokens whose logits are needed.
    """
    heads, groups, hidden = model.num_attention_heads, model.num_query_groups, model.hidden_size
    attention = hidden * (2 * heads + 2 * groups) * model.head_size
    ffn = 3 * hidden * model.ffn_hidden_size
    if model.num_experts and model.experts_per_token and model.expert_ffn_hidden_size:
        ffn = 3 * hidden * model.expert_ffn_hidden_size * model.experts_per_token + hidden * model.num_experts
    products = 2 * (model.num_layers * (attention + ffn) * tokens + hidden * vocabulary * predictions)
    of_attention = model.num_layers * 4 * heads * model.head_size * pairs
    if model.lora is None:
        return 3.0 * (products + of_attention)
    adapters = 2 * model.num_layers * _adapter_parameters(model, model.lora) * tokens
    return 2.0 * products + 3.0 * (of_attention + adapters)


def _adapter_parameters(model: ModelConfig, lora: LoraConfig) -> int:
    """Parameters of a layer's adapters that a token is multiplied with."""
    sizes = model.linear_sizes()
    return sum(
        lora.rank * sum(sizes[name]) * (model.experts_per_token or 1 if name in EXPERT_LINEARS else 1)
        for name in lora.targets
    )


def rows_per_token(model: ModelConfig) -> int:
    """Number of rows gathered for attention that need as much memory as one packed token. A row keeps query, key, value
    and result for the backward pass, and an fp32 sum per head. A token keeps at least the rest of a layer under
    `recompute: selective`: inputs of the norms; a row, and the packed result; the first output of the feed-forward
    network, or for experts their input, output and the product in between.

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
