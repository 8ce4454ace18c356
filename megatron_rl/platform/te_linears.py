"""Transformer Engine's linears in a layer, each with the norm before it, under the names of megatron-core's own layer.

Its column-parallel linear keeps the weight of the norm, and each module what FP8 needs between runs. Here that weight
is the norm's again, and there is nothing else: parameters, checkpoints and what is sent between ranks have the same
names and shapes whichever made the layer.

Imported where Transformer Engine is used alone, with which megatron-core has been imported then.
"""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from torch import Tensor
from torch.nn import Module

from megatron_rl.platform.api import Linears, UnsupportedPlatform

if not HAVE_TE:
    raise UnsupportedPlatform(
        "this megatron-core does not find in this Transformer Engine what it needs: use releases that go together, or "
        "training.transformer_impl=local"
    )


class _WithoutState(Module):
    """Says of its extra state what megatron-core's own linears say, for the sake of the keys of a checkpoint."""

    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: Any) -> None:
        pass


class NormedColumnLinear(_WithoutState, TELayerNormColumnParallelLinear):
    """Norm and column-parallel linear."""


class RowLinear(_WithoutState, TERowParallelLinear):
    """Row-parallel linear."""


class NormOfLinear(Module):
    """Stands in the place of a norm that the linear behind it computes, and holds its weight."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        """As megatron-core makes norms. The linear knows all of that itself."""
        super().__init__()

    def take_weight(self, linear: Module) -> None:
        """Make the weight of the norm a parameter of this module alone, where the linear finds it all the same."""
        self.weight = linear._parameters.pop("layer_norm_weight")
        linear.__dict__["layer_norm_weight"] = self.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def te_linears() -> Linears:
    """See `Platform.linears`."""
    return Linears(NormedColumnLinear, RowLinear, NormOfLinear)
