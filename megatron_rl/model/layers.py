"""megatron-core's transformer layer for packed tokens.

Modules, names and sharded state are megatron-core's; only `forward` differs. Its own passes every token through caches,
cross-attention, offloading and communication that are unused here and took a sixth of the demo's step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl.model.activation import gated_activation
from megatron_rl.model.delta_net import GatedDelta
from megatron_rl.model.experts import GroupedExperts, sort_on_device
from megatron_rl.model.norm import Norm
from megatron_rl.model.platform.attention import Layout
from megatron_rl.model.rotation import Rotations
from megatron_rl.model.router import Replay


@dataclass
class NormsBehind(TransformerLayerSubmodules):
    """Submodules of a layer that has norms behind its attention and its feed-forward network."""


class PackedLayer(TransformerLayer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.submodules_config, NormsBehind):
            self.post_self_attn_layernorm, self.post_mlp_layernorm = (
                Norm(self.config, self.config.hidden_size, self.config.layernorm_epsilon) for _ in range(2)
            )
        attention = self.self_attention
        input_linear = (
            attention.in_proj if isinstance(attention, GatedDelta) else getattr(attention, "linear_qkv", None)
        )
        for norm, linear in (
            (self.input_layernorm, input_linear),
            (self.pre_mlp_layernorm, getattr(self.mlp, "linear_fc1", None)),
        ):
            if not isinstance(norm, Norm | IdentityOp):  # a placeholder: the linear computes the norm
                norm.take_weight(linear)
        if isinstance(getattr(self.mlp, "experts", None), GroupedExperts):
            sort_on_device(self.mlp)
        self.activated = gated_activation(self.config)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        rotary_pos_emb: Rotations,
        packed_seq_params: Layout,
        attention_bias: Replay | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """[tokens, 1, hidden] -> the same, and no context for cross-attention.

        megatron-core's TransformerBlock calls its layers with these parameter names, and passes all of them on as they
        are. The replay is an argument, so that a pass that recomputes the layer replays its own micro-batch.
        """
        rotation = rotary_pos_emb.of(self.layer_number)
        attention = partial(self.self_attention, rotation=rotation, layout=packed_seq_params)
        if isinstance(self.mlp, MoELayer):
            self.mlp.router.begin(len(rotation.cosines), len(hidden_states), attention_bias)
        attended = self.through(self.input_layernorm, hidden_states, attention)
        if behind := isinstance(self.submodules_config, NormsBehind):
            attended = self.post_self_attn_layernorm(attended)
        hidden_states = hidden_states + attended
        out = self.through(self.pre_mlp_layernorm, hidden_states, self.feed_forward)
        return hidden_states + (self.post_mlp_layernorm(out) if behind else out), None

    def feed_forward(self, normed: Tensor) -> Tensor:
        if isinstance(self.mlp, MoELayer):
            return self._experts(normed)
        gate_and_value, _bias = self.mlp.linear_fc1(normed)
        return self.through(self.activated, gate_and_value, lambda activated: self.mlp.linear_fc2(activated)[0])

    def _experts(self, normed: Tensor) -> Tensor:
        """Run the experts on [tokens, 1, hidden].

        megatron-core's dispatcher (0.16.1 and 0.19.2) keeps the probabilities of its last pass, and with them what
        autograd stored for it. A pass that recomputes a layer has no backward, and ends as soon as its tensors are
        restored: without the reset, one such pass would stay in memory per layer.
        """
        try:
            out: Tensor = self.mlp(normed)[0]
        finally:
            vars(self.mlp.token_dispatcher).update(probs=None, sent=None, received=None, of_sources=None)
        return out

    def through(
        self, function: Callable[[Tensor], Tensor], tensor: Tensor, consumer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Apply `consumer` to the result of `function`, which is cheap to compute but large to store."""
        return consumer(function(tensor))


class SelectiveLayer(PackedLayer):
    """Keeps only the inputs of norms and activations for the backward pass, which repeats them for their own gradient
    and for that of the next product. They take most of the memory and the least time; attention keeps little but its
    input."""

    def through(
        self, function: Callable[[Tensor], Tensor], tensor: Tensor, consumer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return consumer(function(tensor))
        output = _recomputed(function, tensor)
        kept, elements = output.untyped_storage()._cdata, output.numel()

        # The output is large and the consumer saves it for its backward pass. Each saved tensor that is all of it is
        # replaced by its shape, and computed again from the input when the backward pass asks. It is recognised by its
        # storage: a linear saves a view, [tokens, hidden] of [tokens, 1, hidden]. A part of it, or a transpose, is
        # kept, because the shape alone would not say which elements are meant.
        def pack(saved: Tensor) -> Tensor | torch.Size:
            whole = saved.untyped_storage()._cdata == kept and saved.numel() == elements and saved.is_contiguous()
            return saved.shape if whole else saved

        def unpack(packed: Tensor | torch.Size) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            with torch.no_grad():
                return function(tensor).view(packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return consumer(output)


class RecomputedLayer(PackedLayer):
    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return _recomputed(super().forward, *args, **kwargs)


def _recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function under torch's checkpoint. megatron-core's also handles the random state of dropout, which is 0."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
