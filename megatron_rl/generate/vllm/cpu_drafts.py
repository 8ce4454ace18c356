"""Repair of a fault in vLLM's build for CPUs (0.32) that changes what speculative decoding samples.

vLLM gives each drafted token the temperature, top-k and top-p of its request by `expand_batch_to_tokens`. The kernel of
that build writes into a copy unless the numbers are 64-bit integers, so that the result stays memory with any content:
tokens are sampled at a temperature of 0, 1e28 or NaN. Log-probs are computed elsewhere and are right, so no probe finds
it. Builds for GPUs have another kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor


def repair() -> None:
    """Replace the function in this process, which is one of vLLM's workers on a CPU."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = of_tokens


def of_tokens(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Repeat a number of each request for each of its tokens.

    Args:
        x: [requests]
        cu_num_tokens: [requests] tokens of a request and those before it.
        num_tokens: tokens of all requests.
        replace_from: number that becomes `replace_to`, such as the temperature 0 of greedy sampling.

    Returns [num_tokens].
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)
