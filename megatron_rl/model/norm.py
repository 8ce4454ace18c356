"""RMSNorms for packed tokens."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.nn.functional import rms_norm


class Norm(torch.nn.RMSNorm):
    """RMSNorm (arXiv 1910.07467) that supports a part of the tokens, which megatron-core's own torch norm refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered = config.layernorm_zero_centered_gamma
        if self.zero_centered:
            torch.nn.init.zeros_(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # finalize_model_grads

    def forward(self, x: Tensor) -> Tensor:
        if not self.zero_centered:
            return super().forward(x)
        # In fp32, as transformers does for these models: 1 + weight loses the weight's last bits in bf16.
        return rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class JointNorm(torch.nn.Module):
    """RMSNorm over all heads of a layer together, of which each tensor-parallel rank has some (OLMo 2,
    arXiv 2501.00656)."""

    def __init__(self, weight: Tensor, heads: int, eps: float, ranks: Any) -> None:
        """
        weight: [heads of this rank * head_size], whose values do not matter.
        heads: of all ranks.
        ranks: tensor-parallel group.
        """
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones_like(weight))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        self._heads, self._eps, self._ranks = heads, eps, ranks

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads of this rank, head_size] -> the same, computed in fp32."""
        wide = x.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        if self._ranks.size() > 1:  # summed in both directions: each rank's result depends on the squares of all
            reduced = reduce_from_tensor_model_parallel_region(squares, self._ranks)
            squares = copy_to_tensor_model_parallel_region(reduced, self._ranks)
        normed = wide * torch.rsqrt(squares / (self._heads * x.shape[-1]) + self._eps)
        return (normed * self.weight.float().view(x.shape[-2:])).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        key = f"{prefix}weight"
        return {
            key: make_tp_sharded_tensor_for_checkpoint(
                self.weight,
                key,
                prepend_offsets=sharded_offsets,
                tp_group=self._ranks,
                dp_cp_group=(metadata or {})["dp_cp_group"],
            )
        }
