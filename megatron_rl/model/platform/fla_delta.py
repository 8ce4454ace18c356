"""The gated delta rule by the kernels of flash-linear-attention, and the convolution by those of causal-conv1d.

Imported only on a GPU. No machine of this project's tests has these packages: what calls them here follows their
documentation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_rl.model.platform.delta_rule import ConsecutiveSequences, DeltaKernels, PlainDelta

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FlaDelta(PlainDelta):
    rule: Callable[..., Any] | None  # fla's chunk_gated_delta_rule
    convolve: Callable[..., Any] | None  # causal_conv1d_fn

    def convolved(
        self, tokens: Tensor, weight: Tensor, sequences: ConsecutiveSequences, history: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self.convolve is None or history is not None:
            return PlainDelta.convolved(self, tokens, weight, sequences, history)
        out = self.convolve(tokens.contiguous().t()[None], weight, seq_idx=sequences.numbers[None], activation="silu")
        further = sequences.preceded(weight.shape[1] - 1)
        return out[0].t(), further.filled(tokens.detach(), None)[further.last]

    def delta_rule(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        decay: Tensor,
        beta: Tensor,
        sequences: ConsecutiveSequences,
        memory: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if self.rule is None or heads[2].dtype is torch.float32:  # which fla's kernel refuses
            return PlainDelta.delta_rule(self, heads, decay, beta, sequences, memory)
        repeats = heads[2].shape[1] // heads[1].shape[1]
        query, key = (each.repeat_interleave(repeats, dim=1) for each in heads[:2])
        out, memory = self.rule(
            *(each[None].contiguous() for each in (query, key, heads[2], decay, beta)),
            initial_state=memory,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=sequences.cu_seqlens,
        )
        return out[0], memory


def find_delta_kernels() -> DeltaKernels:
    """Return the kernels that are installed, with plain torch for the others."""
    packages = {
        "flash-linear-attention": _found("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
        "causal-conv1d": _found("causal_conv1d", "causal_conv1d_fn"),
    }
    if missing := [name for name, function in packages.items() if function is None]:
        logger.warning(
            "gated delta nets are computed in plain torch, which is slow and takes memory: install %s",
            " and ".join(missing),
        )
    return FlaDelta(*packages.values())


def _found(package: str, function: str) -> Callable[..., Any] | None:
    try:
        found: Callable[..., Any] = getattr(import_module(package), function)
    except (ImportError, OSError):  # OSError: a library that it needs is missing
        return None
    return found
