"""Checksum of the weights that adapters belong to."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.model.config import ModelConfig
from megatron_rl.model.hf_mapping import OUTPUT
from megatron_rl.model.hf_parts import held_weights
from megatron_rl.model.policy import Policy

_BITS = {2: torch.int16, 4: torch.int32}


def weights_checksum(policy: Policy, model: ModelConfig, control: dist.ProcessGroup) -> str:
    """Checksum of all weights except adapters, the same in every layout. Collective over all ranks, which are those of
    `control`. Of ranks with the same part, the first counts."""
    own = 0
    for held in held_weights(policy, model):
        counted = held.copies.rank() == 0 and (held.weight.split is not None or held.ranks.rank() == 0)
        if counted and not (held.name == OUTPUT and model.tied_embeddings):
            for piece in held.pieces():
                own += checksum(piece.source.name, piece.view)
    total = torch.tensor([(own + 2**63) % 2**64 - 2**63])  # int64 adds modulo 2^64
    dist.all_reduce(total, group=control)
    return checksum_text(int(total))


def checksum(name: str, part: Tensor) -> int:
    """Checksum of a part of a tensor, by Hugging Face's name: the sum of its bits, times a factor of its name. The
    checksums of all parts add up to that of the whole, modulo 2^64."""
    bits = part.contiguous().view(_BITS[part.element_size()])
    return int(bits.sum(dtype=torch.int64)) * zlib.crc32(name.encode())


def checksum_text(total: int) -> str:
    return f"sum-{total & (2**64 - 1):016x}"
