"""Whole adapters as differences of Hugging Face's weights. No megatron-core."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megatron_rl.model.config import LoraConfig
from megatron_rl.model.hf_mapping import Weight, pieces
from megatron_rl.model.lora_mapping import module_of


def module_matrices(weight: Weight, matrix: Tensor) -> dict[str, Tensor]:
    """Matrices of the modules in one of megatron-core's, by module: [rank, inputs] of lora_A, [outputs, rank] of
    lora_B."""
    return {module_of(piece.source.name): piece.view.reshape(piece.source.shape) for piece in pieces(weight, matrix)}


def deltas(a: tuple[Weight, Tensor], b: tuple[Weight, Tensor], lora: LoraConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the weight of each targeted module in a linear, by Hugging Face's name, and what to add to it, [outputs,
    inputs] in fp32.

    a, b: both matrices of the linear, whole.
    """
    of_a, of_b = module_matrices(*a), module_matrices(*b)
    for module, matrix in of_a.items():
        yield f"{module}.weight", lora.scale * (of_b[module].float() @ matrix.float())


def add(weight: Tensor, delta: Tensor) -> Tensor:
    """Return their sum, computed in fp32 and rounded once to the weight's dtype."""
    return (weight.float() + delta).to(weight.dtype)
