"""Linears of each kind of layer, and what the layer keeps of a token. Pure: arithmetic, memory and cache follow from
it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import Literal, NamedTuple

from megatron_rl.recipe.lora_section import LoraConfig
from megatron_rl.recipe.model import ModelConfig, by_key_heads
from megatron_rl.recipe.model_parts import LayerType


class LayerKind(NamedTuple):
    attention: LayerType
    has_experts: bool


class LinearSize(NamedTuple):
    inputs: int
    modules: Mapping[str, int]
    """Modules in transformers of which the linear consists -> outputs of each."""
    split: Literal["inputs", "outputs"] | None = "outputs"
    """Side that tensor-parallel ranks split; None: each has all of it."""
    bias: bool = False

    @property
    def outputs(self) -> int:
        return sum(self.modules.values())

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs

    def of_rank(self, tp: int) -> int:
        """Parameters that one rank holds."""
        outputs = self.outputs // tp if self.split == "outputs" else self.outputs
        return self.weights // (tp if self.split else 1) + outputs * self.bias

    def targets(self, lora: LoraConfig) -> list[str]:
        """Modules with an adapter."""
        return [name for name in self.modules if name in lora.targets]


class HeadWidths(NamedTuple):
    """Numbers of a token in all heads of an attention layer."""

    query: int
    key: int
    value: int
    result: int


def layer_kinds(model: ModelConfig, layers: range | None = None) -> Counter[LayerKind]:
    """Count the layers of each kind.

    layers: numbers, from 0; default: all.
    """
    numbers = range(model.num_layers) if layers is None else layers
    return Counter(LayerKind(model.layer_type(number), model.has_experts(number)) for number in numbers)


def prediction_kind(model: ModelConfig) -> LayerKind:
    """Kind of the decoder layer in a prediction layer: all published ones attend fully, with experts if there are
    any."""
    return LayerKind("full_attention", model.num_experts is not None)


def stage_layers(layers: int, stages: int, first: int | None = None, last: int | None = None) -> list[range]:
    """Layers of each pipeline stage, from 0.

    first, last: layers of the first and of the last stage; the others have equal shares of the rest.
    """
    ends = [size for size in (first, last) if size is not None]
    others = stages - len(ends)
    share = (layers - sum(ends)) // others if others else 0
    counts = [share if first is None else first, *[share] * (stages - 2), share if last is None else last][-stages:]
    stops = list(accumulate(counts))
    return [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def replica_layers(layers: int, stages: int) -> list[range]:
    """Layers of each stage of an inference replica. vLLM gives some stages a layer more where the stages do not divide
    the layers; here all have it."""
    size = -(-layers // stages)
    starts = (min(stage * size, layers - size) for stage in range(stages))
    return [range(start, start + size) for start in starts]


def head_widths(model: ModelConfig) -> HeadWidths:
    """Numbers of layers that attend. Latent attention expands keys and values for every query head."""
    heads, groups, head = model.num_attention_heads, model.num_query_groups, model.head_size
    if latent := model.latent_attention:
        values = heads * latent.v_head_dim
        return HeadWidths(heads * head, heads * head, values, values)
    return HeadWidths(heads * head, groups * head, groups * head, heads * head)


def attention_linears(model: ModelConfig, attention: LayerType) -> tuple[LinearSize, ...]:
    hidden, wide = model.hidden_size, head_widths(model)
    if attention == "linear_attention" and (net := model.delta_net):
        keys, values = net.key_heads * net.key_head_dim, net.value_heads * net.value_head_dim
        rows = {"qkv": 2 * keys + values, "z": values, "b": net.value_heads, "a": net.value_heads}
        if by_key_heads(model.architecture, model.num_experts):
            rows = {"qkvz": 2 * keys + 2 * values, "ba": 2 * net.value_heads}
        into = LinearSize(hidden, {f"in_proj_{name}": count for name, count in rows.items()})
        return into, LinearSize(values, {"out_proj": hidden}, "inputs")
    out = LinearSize(wide.result, {"o_proj": hidden}, "inputs", model.output_bias)
    if latent := model.latent_attention:
        query: tuple[LinearSize, ...] = (LinearSize(hidden, {"q_proj": wide.query}),)
        if rank := latent.q_lora_rank:
            query = LinearSize(hidden, {"q_a_proj": rank}, None), LinearSize(rank, {"q_b_proj": wide.query})
        short = latent.kv_lora_rank + latent.qk_rope_head_dim
        expanded = model.num_attention_heads * latent.qk_nope_head_dim + wide.value
        down = LinearSize(hidden, {"kv_a_proj_with_mqa": short}, None)
        return *query, down, LinearSize(latent.kv_lora_rank, {"kv_b_proj": expanded}), out
    query_and_gate = wide.query + wide.result * model.attention_gate
    modules = {"q_proj": query_and_gate, "k_proj": wide.key, "v_proj": wide.value}
    return LinearSize(hidden, modules, bias=model.qkv_bias), out


def attention_vectors(model: ModelConfig, attention: LayerType, tp: int = 1) -> int:
    """Parameters of a layer's attention that one rank holds outside linears: norms, sinks, convolution, decay."""
    if attention == "linear_attention" and (net := model.delta_net):
        return (net.conv_kernel * convolved(model) + 2 * net.value_heads) // tp + net.value_head_dim
    sinks = model.num_attention_heads // tp * model.attention_sinks
    if latent := model.latent_attention:
        return sinks + latent.kv_lora_rank + (latent.q_lora_rank or 0)
    normed = (model.num_attention_heads + model.num_query_groups) // tp if model.qk_norm_of == "layer" else 2
    return sinks + normed * model.head_size * model.qk_norm


def convolved(model: ModelConfig) -> int:
    """Channels of the convolution of a delta net: its queries, keys and values."""
    net = model.delta_net
    return 2 * net.key_heads * net.key_head_dim + net.value_heads * net.value_head_dim if net else 0


def feed_forward_linears(model: ModelConfig, has_experts: bool) -> tuple[LinearSize, ...]:
    """Linears that process every token: those of a dense layer, or router and shared expert."""
    if not has_experts:
        return _gated(model.hidden_size, model.ffn_hidden_size)
    router = LinearSize(model.hidden_size, {"gate": model.num_experts or 0}, None, model.router.linear_bias)
    gate = (LinearSize(model.hidden_size, {"shared_expert_gate": 1}, None),) * model.shared_expert_gate
    shared = model.shared_expert_ffn_hidden_size
    return router, *(_gated(model.hidden_size, shared) if shared else ()), *gate


def expert_linears(model: ModelConfig) -> tuple[LinearSize, ...]:
    return _gated(model.hidden_size, model.expert_ffn_hidden_size or 0, model.expert_bias)


def feed_forward_widths(model: ModelConfig, has_experts: bool) -> tuple[int, int]:
    """Widths between the linears of the network that each token passes, and of the experts that are chosen for it, all
    of them together."""
    if not has_experts:
        return model.ffn_hidden_size, 0
    return model.shared_expert_ffn_hidden_size or 0, (model.experts_per_token or 0) * (
        model.expert_ffn_hidden_size or 0
    )


def projection_ahead(model: ModelConfig) -> LinearSize:
    """Linear of a prediction layer before its decoder layer; each tensor-parallel rank has all of it."""
    return LinearSize(2 * model.hidden_size, {"eh_proj": model.hidden_size}, None)


def token_linears(model: ModelConfig, kind: LayerKind) -> list[LinearSize]:
    """Linears of a layer that a token passes, those of each chosen expert included."""
    chosen = expert_linears(model) * ((model.experts_per_token or 0) * kind.has_experts)
    return [*attention_linears(model, kind.attention), *feed_forward_linears(model, kind.has_experts), *chosen]


def _gated(hidden: int, width: int, bias: bool = False) -> tuple[LinearSize, LinearSize]:
    into = LinearSize(hidden, {"gate_proj": width, "up_proj": width}, bias=bias)
    return into, LinearSize(width, {"down_proj": hidden}, "inputs", bias)
