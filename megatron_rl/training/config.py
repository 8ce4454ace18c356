"""Recipe keys of the training itself: steps, packing, optimizer."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from megatron_rl.model.config import Recompute
from megatron_rl.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class OptimizerConfig(Section):
    """Adam through megatron-core."""

    learning_rate: NonNegativeFloat
    min_learning_rate: NonNegativeFloat = 0.0
    """End of the decay; ignored where `decay` is constant."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NonNegativeFloat = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    epsilon: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0
    """Largest gradient norm; 0 does not clip."""
    distributed: bool = True
    """Shard the optimizer state over the data- and context-parallel ranks."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and sum gradients in fp32, whatever `model.dtype` is."""
    max_nonfinite_updates: PositiveInt = 3
    """Updates with a non-finite gradient are skipped and counted; this many in a row stop the run."""


def learning_rate(updates_done: int, total_updates: int, config: OptimizerConfig) -> float:
    """Rate of the next update: linear warm-up over `warmup_steps`, then `decay` to `min_learning_rate` at the end."""
    if updates_done < config.warmup_steps:
        return config.learning_rate * (updates_done + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.learning_rate
    passed = (updates_done - config.warmup_steps) / max(1, total_updates - config.warmup_steps)
    left = 1 - min(1.0, passed)
    factor = left if config.decay == "linear" else (1 - math.cos(math.pi * left)) / 2
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * factor


class TrainingConfig(Section):
    steps: PositiveInt
    """GRPO steps of the whole run."""
    seed: NonNegativeInt = 0
    """Seed of prompts, sampling and shuffling."""
    tokens_per_microbatch: PositiveInt = 16384
    """Tokens packed into one forward and backward on a rank; an answer that alone has more makes its own. Ranks that
    share out a micro-batch (`placement.training.cp`) have so many each. A prompt that several answers share is packed
    once; as attention gathers it for each of them, a fifth to a tenth of it counts for each, by the model's shape: what
    that takes of memory."""
    sequence_length: PositiveInt | None = None
    """Longest prompt plus answer, in tokens; default: model.max_position_embeddings."""
    recompute: Recompute = "none"
    """What the backward pass computes again instead of keeping it: nothing, norms and activations, or whole layers."""
    transformer_impl: Literal["auto", "transformer_engine", "local"] = "auto"
    """Whose linears, and norms before them, the layers are made of: Transformer Engine's or megatron-core's. auto: the
    first where it is installed, on GPUs, for models in bf16 without experts; attempts/NNN/kernels.json says what that
    came to. Weights and checkpoints are the same."""
    fp8: Literal["none", "hybrid", "e4m3"] = "none"
    """Compute the layers' products in FP8, each tensor scaled by its present largest value: hybrid takes E5M2 for
    gradients, e4m3 one format for all. Generation and scoring do as training does. Needs Transformer Engine."""
