"""Estimate of a decode step from what its kernels read, their number, and the sums between GPUs."""

from __future__ import annotations

from launcher.plan.memory_terms import WEIGHT_BYTES
from launcher.plan.parameters import Weights
from launcher.plan.sizes import Sizes
from launcher.simulate.scenario import DecodeSpeed, Work
from megatron_rl.config import RunConfig
from megatron_rl.platform.cards import Card
from megatron_rl.platform.kernel_speed import (
    BLOCK_BYTES_PER_S,
    SPLIT_TOKENS,
    kernels_of_step,
    key_splits,
)

PREFILL_MFU = 0.4
"""Share of the peak FLOP/s that prefill reaches: a rule of thumb."""
MEMORY_SHARE = 0.85
"""Share of the data sheet's bandwidth at which products and attention read: a rule of thumb."""
KERNEL_S = 2e-6
"""Seconds that a kernel of a recorded step takes beside its memory traffic, to start and to end: a rule of thumb."""
SUM_S = 5e-6
"""Seconds of a sum over the GPUs of a node in symmetric memory: a rule of thumb. NCCL's takes three times as long."""


def decode_speed(config: RunConfig, sizes: Sizes, engine: Weights, card: Card, work: Work) -> DecodeSpeed:
    """Estimate decode steps, each of which reads the dense weights, the experts that any row needs, and the caches.

    Args:
        engine: parameters of one rank.
    """
    model, size, tp = config.model, WEIGHT_BYTES[config.model.dtype], sizes.inference_tp
    layers, heads = model.num_layers, -(-model.num_query_groups // tp)
    share = (model.experts_per_token or 0) / (model.num_experts or 1)
    splits = key_splits(config.sequence_length)
    kernels = kernels_of_step(layers, fused=model.num_experts is None and model.lora is None, splits=splits, ranks=tp)
    beside = kernels.short * KERNEL_S + kernels.sums * SUM_S
    bytes_per_s = card.memory_bytes_per_s * MEMORY_SHARE

    def seconds(rows: int) -> float:
        asked = 1 - (1 - share) ** rows  # share of the experts that any row needs, if all are chosen equally often
        read = size * (engine.dense + engine.experts * asked) / bytes_per_s
        computed = 2 * rows * (engine.dense + engine.experts * share) / (card.bf16_flops * PREFILL_MFU)
        return max(read, computed) + beside

    most = config.inference.max_batch
    counts = sorted({1, most, *(2**power for power in range(1, most.bit_length()))})
    cached = 2 * size * layers * heads * model.head_size  # bytes per token
    length = work.prompt_tokens + work.lengths.mean / 2
    blocks = heads * min(splits, max(1.0, length / SPLIT_TOKENS))  # that read the keys and values of a row
    return DecodeSpeed(
        tuple((rows, seconds(rows)) for rows in counts), cached / bytes_per_s, cached / (blocks * BLOCK_BYTES_PER_S)
    )
