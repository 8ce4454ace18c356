"""Recipe keys of adapters (LoRA)."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, model_validator

from megatron_rl.recipe.section import (
    PositiveFloat,
    PositiveInt,
    Section,
)

EXPERT_LINEARS = ("gate_proj", "up_proj", "down_proj")
"""Linears of a feed-forward network, or of each expert, by their names in transformers."""
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", *EXPERT_LINEARS)
"""Linears of most models that have an adapter by default, by their names in transformers and PEFT."""


def lora_linears(two_of_queries: bool | None, by_key_heads: bool | None) -> tuple[str, ...]:
    """Linears of a model that may have an adapter.

    Args:
        two_of_queries: whether latent attention computes queries from a short vector; None: no latent attention.
        by_key_heads: whether gated delta nets have the projections of Qwen3-Next, or those of Qwen3.5; None: no
            delta nets.
    """
    attention = LORA_TARGETS[:4]
    if two_of_queries is not None:
        queries = ("q_a_proj", "q_b_proj") if two_of_queries else ("q_proj",)
        attention = (*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    return (*attention, *(() if by_key_heads is None else delta_linears(by_key_heads)), *EXPERT_LINEARS)


def delta_linears(by_key_heads: bool) -> tuple[str, ...]:
    inputs = ("qkvz", "ba") if by_key_heads else ("qkv", "z", "b", "a")
    return (*(f"in_proj_{name}" for name in inputs), "out_proj")


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685). Training changes them alone: for the weight W of each target, which
    stays as it is, the product is (W + scale B A) x with A [rank, inputs] and B [outputs, rank]."""

    rank: PositiveInt
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """Numerator of the scale, alpha / rank."""
    targets: list[str] = list(LORA_TARGETS)
    """Linears with an adapter, by their names in transformers: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj,
    down_proj. With experts, the last three are those of every expert, shared ones included, and of dense layers. Latent
    attention has q_a_proj, q_b_proj (or q_proj alone), kv_a_proj_with_mqa, kv_b_proj and o_proj. Gated delta nets have
    in_proj_qkvz, in_proj_ba and out_proj in Qwen3-Next, and in_proj_qkv, in_proj_z, in_proj_b, in_proj_a and out_proj
    in Qwen3.5. Default: all of the model."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is set to 0 in the passes of an update. Generation, scoring and the KL penalty
    drop nothing. GRPO then scores each batch before its updates, which costs a forward pass where a step has a single
    update: the ratio of new to old probability compares a pass that drops inputs with the policy that sampled."""
    rs: bool = False
    """Rank-stabilised scale (arXiv 2312.03732): alpha / sqrt(rank)."""

    @model_validator(mode="after")
    def _targets_differ(self) -> LoraConfig:
        if len({*self.targets}) < len(self.targets) or not self.targets:
            raise ValueError("targets: name each linear once, and at least one")
        return self

    @property
    def scale(self) -> float:
        """Factor of the product of both matrices."""
        return self.alpha / (math.sqrt(self.rank) if self.rs else self.rank)
