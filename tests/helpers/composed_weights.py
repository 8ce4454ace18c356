"""Hugging Face's tensors as a replica puts them together."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatron_rl.generate.vllm.whole_weights import Parts, WholeWeights
from megatron_rl.model.hf_mapping import Assembly


def composed_tensors(whole: WholeWeights, parts: Mapping[str, Parts]) -> dict[str, Tensor]:
    assembly, tensors = Assembly(whole.expected), {}
    for name, weight in whole.expected.items():
        for source, matrix in zip(weight.sources, whole.compose(name, parts), strict=True):
            tensors |= dict(assembly.add(source, matrix))
    return tensors
