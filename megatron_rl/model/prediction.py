"""The prediction layer (multi-token prediction, MTP): from the model's output at a token and the next token, it
predicts the one after that (DeepSeek-V3, arXiv 2412.19437, equations 21 to 23).

    h' = decoder layer(eh_proj [enorm(embedding of token t + 1) ; hnorm(output at token t)])
    logits of token t + 2 = output layer(final_layernorm(h'))

The output is that behind the model's last norm, as in vLLM, where published layers draft. Modules and names are
megatron-core's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.nn import ModuleList

from megatron_rl.model.latent_attention import WholeLinear
from megatron_rl.model.norm import Norm
from megatron_rl.model.platform.attention import Layout
from megatron_rl.model.rotation import Rotations


class PredictionLayer(MegatronModule):
    def __init__(self, config: TransformerConfig, spec: Any, groups: ProcessGroupCollection) -> None:
        """spec: of the decoder layer inside."""
        super().__init__(config)
        self.tp_group = groups.tp
        hidden, epsilon = config.hidden_size, config.layernorm_epsilon
        self.enorm, self.hnorm = Norm(config, hidden, epsilon), Norm(config, hidden, epsilon)
        self.eh_proj = WholeLinear(2 * hidden, hidden, config=config, tp_group=groups.tp)
        before = get_transformer_layer_offset(config, pp_rank=groups.pp.rank())  # which the layer adds to its number
        number = config.num_layers + 1 - before
        self.transformer_layer = build_module(spec, config=config, layer_number=number, pg_collection=groups)
        self.final_layernorm = Norm(config, hidden, epsilon)

    def forward(self, embedded: Tensor, hidden: Tensor, rotations: Rotations, layout: Layout) -> Tensor:
        """Run the layer: embedded (of the next token), hidden (of the model), and the result are [tokens, 1, hidden],
        or this rank's part of them under sequence parallelism. rotations: those of all tokens."""
        both = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)
        projected, _bias = self.eh_proj(both)
        out, _context = self.transformer_layer(projected, rotary_pos_emb=rotations, packed_seq_params=layout)
        normed: Tensor = self.final_layernorm(out)
        return normed


class PredictionBlock(MegatronModule):
    """megatron-core's block of prediction layers, with one."""

    def __init__(self, config: TransformerConfig, spec: Any, groups: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.layers = ModuleList([PredictionLayer(config, spec, groups)])

    def forward(self, embedded: Tensor, hidden: Tensor, rotations: Rotations, layout: Layout) -> Tensor:
        """Run the layer: arguments and result as of `PredictionLayer.forward`."""
        layer: Any = self.layers[0]
        out: Tensor = layer(embedded, hidden, rotations, layout)
        return out

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the sharded state of the layer: megatron-core takes a ModuleList for weights that no rank splits."""
        layer: Any = self.layers[0]
        state: dict[str, Any] = layer.sharded_state_dict(f"{prefix}layers.0.", *args, **kwargs)
        return state


def with_prediction(make: Callable[[], GPTModel], spec: Any) -> GPTModel:
    """Make a model whose last pipeline stage has the prediction layer. Its random weights are drawn last, so that the
    others are those of a model without it."""
    policy = make()
    if policy.post_process:
        policy.mtp = PredictionBlock(policy.config, spec, policy.pg_collection)
    return policy
