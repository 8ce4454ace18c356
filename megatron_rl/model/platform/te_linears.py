"""Transformer Engine's linears, each with the norm before it, under the names of megatron-core's own layer.

Its column-parallel linear owns the weight of the norm, and each module the FP8 state between runs. Here the weight
belongs to the norm again and there is no such state, so that parameters, checkpoints and transfers have the same names
and shapes with either implementation.

Imported only if Transformer Engine is used, and was found when megatron-core was imported.
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

from megatron_rl.model.platform.device import Linears, UnsupportedPlatform

if not HAVE_TE:
    raise UnsupportedPlatform(
        "this megatron-core misses parts of this Transformer Engine: use releases that fit together, or "
        "training.transformer_impl=local"
    )


class _WithoutState(Module):
    """Reports the extra state of megatron-core's own linears, so that checkpoints have the same keys."""

    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: Any) -> None:
        pass


class NormedColumnLinear(_WithoutState, TELayerNormColumnParallelLinear):
    """Norm and column-parallel linear."""


class RowLinear(_WithoutState, TERowParallelLinear):
    """Row-parallel linear."""


class NormOfLinear(Module):
    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        """Has the signature of megatron-core's norms. The linear knows the values itself."""
        super().__init__()

    def take_weight(self, linear: Module) -> None:
        """Move the weight of the norm to this module's parameters; the linear still finds it as an attribute."""
        self.weight = linear._parameters.pop("layer_norm_weight")
        linear.__dict__["layer_norm_weight"] = self.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def te_linears() -> Linears:
    return Linears(NormedColumnLinear, RowLinear, NormOfLinear)
