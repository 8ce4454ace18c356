"""Rotary positions (RoPE, arXiv 2104.09864): frequencies as transformers computes them, and the rotation of heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.model_parts import RopeScaling


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotates queries and keys by their positions, both at once and with the same sines in every layer. megatron-core
    rotates them one by one and computes the sines each time."""

    cosines: Tensor  # [tokens, 1, rotated]: of the first dimensions of a head
    sines: Tensor  # [tokens, 1, rotated], negated in the first half

    def at(self, positions: Tensor) -> Rotation:
        """Select the rotations of tokens from a table of all positions. positions: [tokens]"""
        return Rotation(self.cosines.index_select(0, positions), self.sines.index_select(0, positions))

    def turn(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate both; each [tokens, heads, head_size]."""
        both = self.turned(torch.cat((query, key), dim=1))
        query, key = both.split((query.shape[1], key.shape[1]), dim=1)
        return query, key

    def turned(self, heads: Tensor) -> Tensor:
        """Rotate [tokens, heads, head_size] -> the same. The dimensions behind those of the cosines stay."""
        rotated = self.cosines.shape[-1]
        if rotated < heads.shape[-1]:
            first, others = heads.split((rotated, heads.shape[-1] - rotated), dim=-1)
            return torch.cat((self.turned(first), others), dim=-1)
        return torch.addcmul(heads * self.cosines, heads.roll(rotated // 2, dims=-1), self.sines)


@dataclass(frozen=True, slots=True)
class Rotations:
    """Rotations of all layers, each by its type of attention."""

    of_all: Rotation
    of_sliding: Rotation | None = None  # None: sliding_attention has the same as full_attention
    sliding: frozenset[int] = frozenset()  # layers of type sliding_attention, counted from 1

    def at(self, positions: Tensor) -> Rotations:
        """Select the rotations of tokens from tables of all positions. positions: [tokens]"""
        of_sliding = self.of_sliding.at(positions) if self.of_sliding else None
        return Rotations(self.of_all.at(positions), of_sliding, self.sliding)

    def of(self, layer: int) -> Rotation:
        """Rotation of a layer, counted from 1."""
        return self.of_sliding if self.of_sliding and layer in self.sliding else self.of_all


def rotation_tables(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Rotations:
    """Tabulate the rotations of all positions, computed in fp32 and stored in `dtype`."""
    factor = model.rope_scaling.cosine_factor if model.rope_scaling else 1.0
    of_all = _table(model.max_position_embeddings, frequencies(model, device), factor, dtype)
    if model.sliding_rope_base is None:
        return Rotations(of_all)
    unscaled = unscaled_frequencies(model.rotated_size, model.sliding_rope_base, device)
    of_sliding = _table(model.max_position_embeddings, unscaled, 1.0, dtype)
    sliding = {n + 1 for n in range(model.num_layers) if model.layer_type(n) == "sliding_attention"}
    return Rotations(of_all, of_sliding, frozenset(sliding))


def _table(positions: int, found: Tensor, factor: float, dtype: torch.dtype) -> Rotation:
    angles = torch.outer(torch.arange(positions, device=found.device).float(), found)
    cosines, sines = angles.cos(), angles.sin()
    if factor != 1.0:
        cosines, sines = cosines * factor, sines * factor
    both = torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)
    return Rotation(*(each[:, None].to(dtype) for each in both))


def frequencies(model: ModelConfig, device: torch.device | None = None) -> Tensor:
    """Radians per position of each pair of rotated dimensions, [rotated / 2] in fp32, as scaled by
    `model.rope_scaling`."""
    found = unscaled_frequencies(model.rotated_size, model.rope_base, device)
    scaling = model.rope_scaling
    if scaling is None or scaling.type == "dynamic":  # which changes only sequences longer than the model's positions
        return found
    if scaling.type == "linear":
        return found / scaling.factor
    positions = scaling.original_max_position_embeddings or model.max_position_embeddings
    if scaling.type == "llama3":
        kept = _of_llama3(found, positions, scaling)
    else:
        kept = _of_yarn(model, positions, scaling).to(found.device)
    return kept * found + (1 - kept) * found / scaling.factor


def unscaled_frequencies(rotated: int, base: float, device: torch.device | None = None) -> Tensor:
    exponents: Tensor = torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / rotated
    return 1.0 / (base**exponents)


def _of_llama3(found: Tensor, positions: int, scaling: RopeScaling) -> Tensor:
    """Share of each frequency that is not divided by the factor (Llama 3.1, arXiv 2407.21783), [rotated / 2]."""
    turns = positions * found / (2 * torch.pi)
    return ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)


def _of_yarn(model: ModelConfig, positions: int, scaling: RopeScaling) -> Tensor:
    """Share of each frequency that is not divided by the factor (YaRN, arXiv 2309.00071, section 3.2), [rotated / 2].

    It falls linearly from the pair of dimensions that makes `beta_fast` turns over the original positions to the one
    that makes `beta_slow`.
    """

    def pair(turns: float) -> float:
        return model.rotated_size * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(model.rope_base))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, model.rotated_size - 1)
    pairs = torch.arange(model.rotated_size // 2, dtype=torch.float32)
    return 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
