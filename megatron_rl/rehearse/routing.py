"""Balanced routing of tokens to experts, for a router that has no values to choose by.

A trained router is close to it, but it is not an upper bound: ranks with popular experts hold more tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

_preprocess = MoEAlltoAllTokenDispatcher.preprocess


@contextmanager
def balanced_routing() -> Iterator[None]:
    """Have every rank send each expert the same number of tokens, inside a `with` block. Patches megatron-core's
    dispatcher, which reads the counts and the mask on the host."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(MoEAlltoAllTokenDispatcher, "preprocess", _count))
        patches.enter_context(mock.patch.object(token_dispatcher, "permute", _permute))
        yield


def equal_shares(tokens: int, experts: int, chosen: int) -> Tensor:
    """[tokens, experts] bool routing map: `chosen` experts for each token; loads of experts differ by at most one."""
    places = torch.arange(tokens * chosen).view(tokens, chosen) % experts
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, places, True)


def _count(dispatcher: MoEAlltoAllTokenDispatcher, routing_map: Tensor) -> Tensor:
    """`preprocess` of equal shares, which have values and are the same on all ranks."""

    def all_gather(counts: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        return counts.repeat(group.size())

    shares = equal_shares(len(routing_map), routing_map.shape[1], dispatcher.config.moe_router_topk)
    with mock.patch.object(token_dispatcher, "gather_from_sequence_parallel_region", all_gather):
        counts: Tensor = _preprocess(dispatcher, shares)
    return counts


def _permute(
    tokens: Tensor, routing_map: Tensor, *, probs: Tensor, num_out_tokens: int, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`permute` with the known number of tokens, which the original reads from the mask."""
    rows = torch.zeros(num_out_tokens, dtype=torch.long, device=tokens.device)
    return tokens.index_select(0, rows), probs.T.contiguous().view(-1).index_select(0, rows), rows
