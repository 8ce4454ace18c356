"""RMSNorm for packed tokens."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
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
