"""Pure: names of the weights that megatron-core's sharded state holds, where equal layers, and all experts of a layer,
share one tensor.

    decoder.layers.mlp.linear_fc2.weight                    [layer, ...]          at layer 3
        -> decoder.layers.3.mlp.linear_fc2.weight
    decoder.layers.mlp.experts.experts.linear_fc2.weight    [layer, expert, ...]  at layer 3, expert 5
        -> decoder.layers.3.mlp.experts.local_experts.5.linear_fc2.weight

Layers that differ (`ModelConfig.equal_layers`) share none:

    decoder.layers.3.mlp.experts.experts.linear_fc2.weight  [expert, ...]         at expert 5
        -> decoder.layers.3.mlp.experts.local_experts.5.linear_fc2.weight

The prediction layer, which no engine gets, begins with `mtp.`
"""

from __future__ import annotations

import re
from collections.abc import Sequence

EMBEDDING = "embedding."
LAYERS = "decoder.layers."
PREDICTION = "mtp.layers.0."
EXPERTS = "mlp.experts.experts."
_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Norms that the sharded state stores with the projection that follows them, as Transformer Engine fuses them."""


def leading_axes(key: str) -> int:
    """Number of axes of a tensor of the sharded state that count layers and experts."""
    if not key.startswith(LAYERS):
        return 0
    layer, rest = _in_layer(key)
    return (layer is None) + rest.startswith(EXPERTS)


def weight_name(key: str, offset: Sequence[int]) -> str:
    """Name of the weight that contains a box, as in `hf_mapping.weights`.

    Args:
        key: name of the whole tensor.
        offset: where the box begins in it.
    """
    if not key.startswith(LAYERS):
        return key
    layer, rest = _in_layer(key)
    if rest.startswith(EXPERTS):
        rest = f"mlp.experts.local_experts.{offset[layer is None]}.{rest.removeprefix(EXPERTS)}"
    return f"{LAYERS}{offset[0] if layer is None else layer}.{_NORMS.get(rest, rest)}"


def _in_layer(key: str) -> tuple[str | None, str]:
    """Number of a layer that has its own tensor, None if all layers share it, and the name in the layer."""
    rest = key.removeprefix(LAYERS)
    number, _, name = rest.partition(".")
    return (number, name) if number.isdigit() else (None, rest)


def loading_order(name: str) -> tuple[int, int, str]:
    """Key that sorts the weights of `weight_name` in an order for loading: those outside of layers, then layer after
    layer with its experts one by one."""
    if not name.startswith(LAYERS):
        return -1, -1, name
    layer, _, rest = name.removeprefix(LAYERS).partition(".")
    _, _, expert = rest.partition(".local_experts.")
    return int(layer), int(expert.partition(".")[0]) if expert else -1, rest


def layer_of(weight: str) -> int | None:
    """Layer of a weight, by its name as in `weight_name`; None for those outside layers."""
    found = re.match(r"decoder\.layers\.(\d+)\.", weight)
    return int(found[1]) if found else None


def expert_of(weight: str) -> int | None:
    """Number of the expert that a weight belongs to, by its name as in `weight_name`; None for all others."""
    found = re.search(r"\.mlp\.experts\.local_experts\.(\d+)\.", weight)
    return int(found[1]) if found else None
