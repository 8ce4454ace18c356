"""Bytes and arithmetic of the engine that generates, also where a vLLM has weights or a cache of 8 bits. Pure.

Scales are left out: at most 1/32 of the weights. Layers that quantization-config names one by one count as whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan.memory_terms import WEIGHT_BYTES, Term, in_words
from launcher.plan.parameters import Weights, generating
from launcher.plan.sizes import Sizes
from megatron_rl.recipe.cards import FP8_CAPABILITY, Card
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.vllm import VllmConfig
from megatron_rl.recipe.vllm_precision import EXPERTS, LINEAR

FP8_PRODUCTS = 2.0
"""FLOP/s of products in FP8 over those in bf16: NVIDIA's data sheets since Ada. Older cards multiply in bf16."""
ROUNDING_KERNELS = 4
"""Kernels of a layer that round the inputs of its products to FP8, one each."""


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """Weights of the fullest GPU of a replica, or of a vLLM beside the ranks."""

    parameters: Weights
    quantised: Weights
    """Weights of 8 bits among them."""
    whole_bytes: int
    """Bytes of each of the others."""

    @property
    def dense_bytes(self) -> int:
        whole = self.parameters.dense - self.quantised.dense
        return self.whole_bytes * whole + self.quantised.dense

    @property
    def expert_bytes(self) -> int:
        whole = self.parameters.experts - self.quantised.experts
        return self.whole_bytes * whole + self.quantised.experts

    @property
    def formula(self) -> str:
        short, size = self.quantised.all, self.whole_bytes
        if not short:
            return f"{size} bytes x {in_words(self.parameters.all)} parameters"
        return (
            f"1 byte x {in_words(short)} quantised parameters + {size} bytes x {in_words(self.parameters.all - short)}"
        )

    def term(self, name: str) -> Term:
        return Term(name, self.dense_bytes + self.expert_bytes, self.formula)


def weights_of_engine(config: RunConfig, vocab: int, sizes: Sizes) -> EngineWeights:
    """vocab: rows of the embedding."""
    model, kinds = config.model, (config.inference.own_vllm or VllmConfig()).precision.weights
    held, ends = generating(model, vocab, sizes)  # neither embedding nor output is quantised
    short = Weights((held.dense - ends) * (LINEAR in kinds), held.experts * (EXPERTS in kinds))
    return EngineWeights(held, short, WEIGHT_BYTES[model.dtype])


def faster_products(config: RunConfig, card: Card) -> float:
    """Products per second of the engine's linear layers over those in bf16."""
    vllm = config.inference.own_vllm
    in_fp8 = vllm is not None and LINEAR in vllm.precision.weights and card.capability >= FP8_CAPABILITY
    return FP8_PRODUCTS if in_fp8 else 1.0
