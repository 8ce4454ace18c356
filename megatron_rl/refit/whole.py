"""The trainer's weights as whole tensors by their Hugging Face names, whatever the layout that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.model.config import ModelConfig
from megatron_rl.model.hf_mapping import OUTPUT, pieces
from megatron_rl.model.hf_parts import Held, held_weights
from megatron_rl.model.policy import Policy


def whole_tensors(policy: Policy, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """What this rank's pipeline stage and experts have, each tensor whole on the first of the ranks that hold its
    parts: of all ranks together each comes once, and one weight at a time is in memory twice. Collective over tensor-
    parallel ranks: each takes the whole iteration, also where nothing comes of it.
    """
    for held in published_weights(policy, model):
        parts = _gather(held)
        if held.ranks.rank() > 0:
            continue
        whole = {source.name: held.tensor.new_empty(source.shape) for source in held.weight.sources}
        for rank, part in enumerate(parts):
            for piece in pieces(held.weight, part, rank, len(parts)):
                place = whole[piece.source.name][piece.index]
                place.copy_(piece.view.reshape(place.shape))
        yield from whole.items()


def published_weights(policy: Policy, model: ModelConfig) -> list[Held]:
    """The weights of this rank that it has a part in publishing: none that another data-parallel copy has too, nor an
    output layer that says what the embedding does."""
    return [
        held
        for held in held_weights(policy, model)
        if held.copies.rank() == 0 and not (held.name == OUTPUT and model.tied_embeddings)
    ]


def _gather(held: Held) -> list[Tensor]:
    """The parts of all ranks, on the first of them; one part where each has all."""
    ranks = held.ranks.size()
    if held.weight.split is None or ranks == 1:
        return [held.tensor]
    own = held.tensor.contiguous()
    parts = [torch.empty_like(own) for _ in range(ranks)] if held.ranks.rank() == 0 else None
    dist.gather(own, parts, group=held.ranks, group_dst=0)
    return parts or []


def buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """The tensors, on the CPU, in groups of at most `limit` bytes, or one that is larger."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    if bucket:
        yield bucket
