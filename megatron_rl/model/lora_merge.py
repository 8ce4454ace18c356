"""Whole adapters as differences of Hugging Face's weights. No megatron-core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from megatron_rl.model.config import LoraConfig
from megatron_rl.model.hf_mapping import Weight, pieces
from megatron_rl.model.lora_mapping import LORA_B, module_of


def matrices(weight: Weight, matrix: Tensor) -> dict[str, Tensor]:
    """Matrices of the modules in one of megatron-core's, which is whole: [rank, inputs] of lora_A, [outputs, rank] of
    lora_B, by their names in `lora_mapping`."""
    return {piece.source.name: piece.view.reshape(piece.source.shape) for piece in pieces(weight, matrix)}


def deltas(a: Mapping[str, Tensor], b: Mapping[str, Tensor], lora: LoraConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the weight of each targeted module in a linear, by Hugging Face's name, and what to add to it, [outputs,
    inputs] in fp32.

    a, b: `matrices` of the linear.
    """
    for name, matrix in a.items():
        module = module_of(name)
        yield f"{module}.weight", lora.scale * (b[f"{module}.{LORA_B}.weight"].float() @ matrix.float())


def add(weight: Tensor, delta: Tensor) -> Tensor:
    """Return their sum, computed in fp32 and rounded once to the weight's dtype."""
    return (weight.float() + delta).to(weight.dtype)
