"""Number of parameters of a model, and of those that one rank holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan.sizes import Sizes
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.layer_sizes import (
    LinearSize,
    attention_linears,
    attention_vectors,
    expert_linears,
    feed_forward_linears,
    layer_kinds,
    prediction_kind,
    projection_ahead,
    replica_layers,
)
from megatron_rl.recipe.lora_section import LoraConfig
from megatron_rl.recipe.model import ModelConfig


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


def weights(model: ModelConfig, vocab: int, tp: int = 1, ep: int = 1, layers: range | None = None) -> Weights:
    """Count the parameters of one rank, adapters and a trained prediction layer included, or of the whole model if both
    sizes are 1.

    Args:
        vocab: rows of the embedding, padding included.
        layers: of the rank's pipeline stage, from 0; default: all.
    """
    layers = range(model.num_layers) if layers is None else layers
    norms, experts = (4 if model.norms == "around" else 2) * model.hidden_size, 0
    dense, kinds = of_ends(model, vocab, tp, layers), layer_kinds(model, layers)
    if model.trains_prediction and layers.stop == model.num_layers:
        kinds[prediction_kind(model)] += 1
        dense += projection_ahead(model).of_rank(tp) + 3 * model.hidden_size
    for kind, count in kinds.items():
        linears = (*attention_linears(model, kind.attention), *feed_forward_linears(model, kind.has_experts))
        of_linears = sum(linear.of_rank(tp) for linear in linears)
        dense += count * (of_linears + attention_vectors(model, kind.attention, tp) + norms)
        if kind.has_experts:
            each = sum(linear.of_rank(tp) for linear in expert_linears(model))
            experts += count * (model.num_experts or 0) // ep * each
    of_adapters = adapters(model, tp, ep, layers)
    return Weights(dense=dense + of_adapters.dense, experts=experts + of_adapters.experts)


def of_ends(model: ModelConfig, vocab: int, tp: int, layers: range) -> int:
    """Parameters of embedding, output layer and last norm, as far as the stage with these layers has them."""
    table, first, last = vocab // tp * model.hidden_size, layers.start == 0, layers.stop == model.num_layers
    ends = table * first + last * model.hidden_size
    if last and not (model.tied_embeddings and first):  # the first and the last stage each hold a copy of a tied table
        ends += table
    return ends


def generating(model: ModelConfig, vocab: int, sizes: Sizes) -> tuple[Weights, int]:
    """Count the parameters of the fullest GPU of an inference replica, and those of embedding, output layer and last
    norm among them. All its GPUs of a stage share the experts."""
    model, tp, found = model.trunk, sizes.inference_tp, []
    for layers in replica_layers(model.num_layers, sizes.inference_pp):
        held = weights(model, vocab, tp, sizes.inference_dp, layers)
        found.append((held, of_ends(model, vocab, tp, layers)))
    return max(found, key=lambda stage: stage[0].all)


def trained(model: ModelConfig, vocab: int, tp: int = 1, ep: int = 1, layers: range | None = None) -> Weights:
    return weights(model, vocab, tp, ep, layers) if model.lora is None else adapters(model, tp, ep, layers)


def adapters(model: ModelConfig, tp: int = 1, ep: int = 1, layers: range | None = None) -> Weights:
    """Count the parameters of the adapters of one rank. Tensor-parallel ranks split B of the linears that they split by
    rows, and A of the others. B of linears that megatron-core fuses has the rows of all of them, targets or not."""
    if model.lora is None:
        return Weights(0, 0)
    dense, experts = 0, 0
    for kind, count in layer_kinds(model, layers).items():
        always = (*attention_linears(model, kind.attention), *feed_forward_linears(model, kind.has_experts))
        dense += count * sum(_of_adapters(linear, model.lora, tp) for linear in always)
        if kind.has_experts:
            each = sum(_of_adapters(linear, model.lora, tp) for linear in expert_linears(model))
            experts += count * (model.num_experts or 0) // ep * each
    return Weights(dense, experts)


def _of_adapters(linear: LinearSize, lora: LoraConfig, tp: int) -> int:
    if not (targets := linear.targets(lora)):
        return 0
    inputs = len(targets) * linear.inputs // (tp if linear.split == "inputs" else 1)
    return lora.rank * (inputs + linear.outputs // (tp if linear.split == "outputs" else 1))
