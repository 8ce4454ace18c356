"""Formulas for the arithmetic and memory that a model needs for its tokens, and the fullest micro-batch of them."""

from __future__ import annotations

from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.layer_sizes import (
    LinearSize,
    convolved,
    feed_forward_widths,
    head_widths,
    layer_kinds,
    prediction_kind,
    projection_ahead,
    token_linears,
)
from megatron_rl.recipe.lora_section import LoraConfig
from megatron_rl.recipe.model import ModelConfig


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


def training_flops(
    model: ModelConfig, vocabulary: int, *, tokens: int, pairs: int, predictions: int, windowed: int | None = None
) -> float:
    """Floating-point operations of a forward and a backward pass, two per multiply-add. Counts products with weights
    and attention only, and recomputation not at all (model FLOPs, arXiv 2204.02311, appendix B). The backward pass
    takes twice the forward pass, except that weights which are not trained have no gradient: with adapters of rank r,
    products with weights count 2 instead of 3 times, and 3 times those with the adapters, r (inputs + outputs) each.

        3 (2 tokens weights + 2 (query + result) pairs + 2 hidden vocabulary predictions)

        weights = of the linears of all layers that a token is multiplied with, of experts those chosen for it
        query, result = numbers of all heads, such as heads head_size; each pair takes a product of both

    A prediction layer that is trained adds a layer, its projection and the output layer, which has no gradient then.

    A delta net reads, corrects and writes its state for each token, heads key_head_dim value_head_dim each.

    Args:
        vocabulary: rows of the output layer.
        tokens: packed tokens; tokens shared by several answers count once.
        pairs: pairs of a packed token and one that it attends to, including itself, if no window limits them.
        predictions: tokens whose logits are needed.
        windowed: the same pairs in layers with a window; default: as many as there are at most.
    """
    if windowed is None:
        windowed = min(pairs, tokens * (model.sliding_window or 0))
    products = 2 * model.hidden_size * vocabulary * predictions
    of_attention, of_adapters, wide, net = 0, 0, head_widths(model), model.delta_net
    for kind, layers in layer_kinds(model).items():
        linears = token_linears(model, kind)
        products += 2 * layers * sum(linear.weights for linear in linears) * tokens
        if model.lora is not None:
            adapted = sum(_adapter_parameters(linear, model.lora) for linear in linears)
            of_adapters += 2 * layers * adapted * tokens
        if kind.attention == "linear_attention" and net:
            of_attention += 6 * layers * net.value_heads * net.key_head_dim * net.value_head_dim * tokens
        else:
            seen = windowed if kind.attention == "sliding_attention" else pairs
            of_attention += 2 * layers * (wide.query + wide.result) * seen
    if model.trains_prediction:
        linears = [projection_ahead(model), *token_linears(model, prediction_kind(model))]
        products += 2 * sum(linear.weights for linear in linears) * tokens
        of_attention += 2 * (wide.query + wide.result) * pairs
    if model.lora is None:
        untrained = 2 * model.hidden_size * vocabulary * predictions * model.trains_prediction
        return 3.0 * (products + of_attention) + 2.0 * untrained
    return 2.0 * products + 3.0 * (of_attention + of_adapters)


def _adapter_parameters(linear: LinearSize, lora: LoraConfig) -> int:
    return sum(lora.rank * (linear.inputs + linear.modules[name]) for name in linear.targets(lora))


def rows_per_token(model: ModelConfig) -> int:
    """Number of rows gathered for attention that need as much memory as one packed token. A row keeps query, key, value
    and result for the backward pass, and an fp32 sum per head. A token keeps at least the rest of a layer under
    `recompute: selective`: inputs of the norms; a row, and the packed result; the first output of the feed-forward
    network, or for experts their input, output and the product in between.

        row = (2 heads + 2 query groups) head_size + 2 heads
        token = 2 hidden + row + heads head_size + 2 ffn_hidden

    In the shipped recipes for GPUs that is between 2 and 8.
    """
    wide, tokens, rows = head_widths(model), 0, 0
    for kind, layers in layer_kinds(model).items():
        row = 2 * model.num_attention_heads + sum(wide)
        if kind.attention == "linear_attention":
            row = convolved(model)
        always, routed = feed_forward_widths(model, kind.has_experts)
        experts = (model.experts_per_token or 0) * kind.has_experts
        feed_forward = 2 * always + experts * 2 * model.hidden_size + 3 * routed
        rows += layers * row
        tokens += layers * (2 * model.hidden_size + row + wide.result + feed_forward)
    return max(1, tokens // rows)
