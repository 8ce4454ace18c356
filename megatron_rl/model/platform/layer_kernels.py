"""Work between the products of a layer in generation: norms, rotation, activation, each as one kernel where Triton is
installed. The choice between Triton's kernels and torch's operators, which compute the same, is made here.

Both round where the training forward rounds, so that log-probs of generation and training differ as little as products
of other sizes do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of queries and keys by head (arXiv 2302.05442)."""

    query: Tensor  # [head_size] weight
    key: Tensor  # [head_size] weight
    eps: float


@dataclass(frozen=True, slots=True)
class Slots:
    keys: Tensor  # [slots, kv_heads, head_size]
    values: Tensor  # [slots, kv_heads, head_size]
    index: Tensor  # [tokens] int64 slot of each token


class LayerKernels(Protocol):
    name: str

    def norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm (arXiv 1910.07467) in fp32. hidden [tokens, hidden], weight [hidden] -> [tokens, hidden]"""

    def add_and_norm(self, hidden: Tensor, other: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def swiglu(self, gate_and_value: Tensor) -> Tensor:
        """[tokens, 2 * ffn] -> [tokens, ffn] (arXiv 2002.05202)."""

    def rotate(
        self, heads: Tensor, cosines: Tensor, sines: Tensor, kv_heads: int, norms: Norms | None, slots: Slots | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split the product of `linear_qkv` and rotate queries and keys by their positions (RoPE, arXiv 2104.09864).

        Args:
            heads: [tokens, (heads + 2 * kv_heads) * head_size], of each group the queries, then its key, its value.
            cosines: [tokens, 1, head_size]
            sines: [tokens, 1, head_size], negated in the first half.
            norms: norms of queries and keys before the rotation.
            slots: where keys and values are also written to.

        Returns:
            query [tokens, heads, head_size], key and value [tokens, kv_heads, head_size]. With `slots` key and value
            may be empty, [0, kv_heads, head_size].
        """


class TorchKernels:
    def __init__(self, reason: str) -> None:
        self.name = f"torch operators ({reason})"

    def norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(hidden, weight.shape, weight, eps)

    def add_and_norm(self, hidden: Tensor, other: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = hidden + other
        return total, self.norm(total, weight, eps)

    def swiglu(self, gate_and_value: Tensor) -> Tensor:
        gate, value = gate_and_value.chunk(2, dim=-1)
        return silu(gate) * value

    def rotate(
        self, heads: Tensor, cosines: Tensor, sines: Tensor, kv_heads: int, norms: Norms | None, slots: Slots | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, head_size = len(heads), cosines.shape[-1]
        groups = heads.view(tokens, kv_heads, -1, head_size)
        query, key, value = groups.split((groups.shape[2] - 2, 1, 1), dim=2)
        query, key, value = query.flatten(1, 2), key.squeeze(2), value.squeeze(2)
        if norms:
            query = rms_norm(query, norms.query.shape, norms.query, norms.eps)
            key = rms_norm(key, norms.key.shape, norms.key, norms.eps)
        query, key = (torch.addcmul(each * cosines, each.roll(head_size // 2, dims=-1), sines) for each in (query, key))
        if slots:
            slots.keys.index_copy_(0, slots.index, key)
            slots.values.index_copy_(0, slots.index, value)
        return query, key, value
