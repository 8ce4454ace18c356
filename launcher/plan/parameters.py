"""Number of parameters of a model, and of those that one rank holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan.sizes import Sizes
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.model import EXPERT_LINEARS, ModelConfig

FUSED = {
    ("q_proj", "k_proj", "v_proj"): False,
    ("o_proj",): True,
    ("gate_proj", "up_proj"): False,
    ("down_proj",): True,
}
"""Modules of transformers in each linear of megatron-core, and whether tensor-parallel ranks split it by its inputs."""


@dataclass(frozen=True, slots=True)
class Weights:
    dense: int
    """Parameters outside experts, which all data-parallel ranks hold."""
    experts: int

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
    """Count the parameters of one rank, adapters included, or of the whole model if all sizes are 1.

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
    of_adapters = adapters(model, tp, pp, ep)
    return Weights(dense=layers * layer + ends + of_adapters.dense, experts=layers * experts + of_adapters.experts)


def generating(model: ModelConfig, vocab: int, sizes: Sizes) -> Weights:
    """Count the parameters of the fullest GPU of an inference replica. All its GPUs of a stage share the experts."""
    # vLLM gives some stages a layer more where the stages do not divide the layers.
    rounded = -(-model.num_layers // sizes.inference_pp) * sizes.inference_pp
    model = model.model_copy(update={"num_layers": rounded})
    tp, pp, dp = sizes.inference_tp, sizes.inference_pp, sizes.inference_dp
    return max((weights(model, vocab, tp, pp, dp, stage) for stage in range(pp)), key=lambda held: held.all)


def trained(model: ModelConfig, vocab: int, tp: int = 1, pp: int = 1, ep: int = 1, stage: int = 0) -> Weights:
    return weights(model, vocab, tp, pp, ep, stage) if model.lora is None else adapters(model, tp, pp, ep)


def adapters(model: ModelConfig, tp: int = 1, pp: int = 1, ep: int = 1) -> Weights:
    """Count the parameters of the adapters of one rank. Tensor-parallel ranks split B of the linears that they split by
    rows, and A of the others. B of linears that megatron-core fuses has the rows of all of them, targets or not."""
    if model.lora is None:
        return Weights(0, 0)
    rank, sizes, dense, feed_forward = model.lora.rank, model.linear_sizes(), 0, 0
    for fused, by_inputs in FUSED.items():
        if not (targeted := [name for name in fused if name in model.lora.targets]):
            continue
        inputs, outputs = len(targeted) * sizes[fused[0]][0], sum(sizes[name][1] for name in fused)
        count = rank * (inputs // tp + outputs if by_inputs else inputs + outputs // tp)
        if fused[0] in EXPERT_LINEARS:
            feed_forward += count
        else:
            dense += count
    layers = model.num_layers // pp
    if model.num_experts:
        return Weights(layers * dense, layers * model.num_experts // ep * feed_forward)
    return Weights(layers * (dense + feed_forward), 0)
