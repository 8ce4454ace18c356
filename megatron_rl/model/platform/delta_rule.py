"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464) and the short convolution before it, in plain torch.

A head keeps a memory S [key_size, value_size], zero at the start of a sequence. Each token decays it, corrects what it
returns for the token's key, and reads it:

    S <- exp(decay) S        S <- S + key (beta (value - S^T key))^T        out = S^T query / sqrt(key_size)

The plain form computes chunks of tokens with few products (section 3.3 of the paper), in fp32: first what depends on
one chunk alone, for the chunks of all sequences at once, then the memories from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

CHUNK = 64
"""Tokens that are computed together, as in flash-linear-attention."""
_EPSILON = 1e-6  # of the lengths of queries and keys, as in transformers and flash-linear-attention


@dataclass(frozen=True, slots=True)
class PrecededRows:
    """Places of rows where each sequence has further rows before it."""

    tokens: Tensor  # [tokens]
    ahead: Tensor  # [sequences, further]
    last: Tensor  # [sequences, further] those at the end of each sequence

    def filled(self, tokens: Tensor, history: Tensor | None) -> Tensor:
        """Return all rows, [rows, channels]; further ones are zeros without a history [sequences, further, channels]"""
        rows = tokens.new_zeros(len(tokens) + self.ahead.numel(), tokens.shape[1]).index_copy(0, self.tokens, tokens)
        return rows if history is None else rows.index_copy(0, self.ahead.flatten(), history.flatten(0, 1))


@dataclass(frozen=True)
class ConsecutiveSequences:
    """Sequences whose tokens are consecutive rows."""

    lengths: Sequence[int]  # at least 1 each
    device: torch.device
    chunk: int = CHUNK
    """Tokens of a chunk. Not a function of the lengths: the bits of a sequence must not depend on its neighbours."""
    _preceded: dict[int, PrecededRows] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """[sequences + 1] start of each, and the end."""
        return self._put(np.cumsum([0, *self.lengths]))

    @cached_property
    def numbers(self) -> Tensor:
        """[tokens] int32, number of each token's sequence."""
        return self._put(np.repeat(np.arange(len(self.lengths)), self.lengths)).int()

    @cached_property
    def chunks(self) -> Chunks:
        lengths, ends, size = np.array(self.lengths), np.cumsum(self.lengths), self.chunk
        order = np.argsort(-lengths, kind="stable")
        place_in_order = np.argsort(order)
        counts = -(-lengths[order] // size)
        active = (counts > np.arange(counts[0])[:, None]).sum(1)
        starts = np.cumsum(active) - active
        offsets = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        chunk = starts[offsets // size] + np.repeat(place_in_order, lengths)
        places = self._put(chunk * size + offsets % size)
        return Chunks(size, places, active.tolist(), self._put(order), self._put(place_in_order))

    def preceded(self, count: int) -> PrecededRows:
        """Place `count` further rows before each sequence. Computed once for all layers."""
        if count not in self._preceded:
            lengths = np.array(self.lengths)
            number = np.arange(len(lengths))
            tokens = np.arange(lengths.sum()) + (np.repeat(number, lengths) + 1) * count
            ahead = (np.cumsum(lengths) - lengths + number * count)[:, None] + np.arange(count)
            self._preceded[count] = PrecededRows(*map(self._put, (tokens, ahead, ahead + lengths[:, None])))
        return self._preceded[count]

    def _put(self, values: object) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of all sequences: the first of each, longest sequence first, then the second of each that has one, and so
    on. Rows behind the end of a sequence stay zero.

    Example: sequences of 3 and 5 tokens in chunks of 2 are b0 b1 | a0 a1 || b2 b3 | a2 - || b4 -, with 2, 2 and 1
    active.
    """

    size: int
    places: Tensor  # [tokens] row of each token
    active: Sequence[int]  # sequences that have a first chunk, a second, ...
    order: Tensor  # [sequences] longest first
    place_in_order: Tensor  # [sequences]

    def laid(self, tokens: Tensor) -> Tensor:
        """[tokens, heads, ...] -> [chunks, heads, size, ...] in fp32"""
        rows = tokens.new_zeros(sum(self.active) * self.size, *tokens.shape[1:], dtype=torch.float32)
        return rows.index_copy(0, self.places, tokens.float()).unflatten(0, (-1, self.size)).transpose(1, 2)

    def taken(self, chunks: Tensor) -> Tensor:
        """[chunks, heads, size, ...] -> [tokens, heads, ...]"""
        return chunks.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


class DeltaKernels(Protocol):
    """Operations of a gated delta net on a device."""

    def convolved(
        self, tokens: Tensor, weight: Tensor, sequences: ConsecutiveSequences, history: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Convolve each channel with its last tokens, silu included.

        tokens [tokens, channels], weight [channels, kernel], history [sequences, kernel - 1, channels], the tokens
        before each sequence; zeros if None -> [tokens, channels], and the history behind each sequence.
        """

    def delta_rule(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        decay: Tensor,
        beta: Tensor,
        sequences: ConsecutiveSequences,
        memory: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Apply the gated delta rule to queries and keys of any length, which are scaled to length 1.

        heads: query and key [tokens, key_heads, key_size], value [tokens, heads, value_size]. decay (a logarithm), beta
        [tokens, heads]. memory [sequences, heads, key_size, value_size] fp32, of each sequence at its start; zeros if
        None -> [tokens, heads, value_size], and the memory at its end.
        """


class PlainDelta(DeltaKernels):
    def convolved(
        self, tokens: Tensor, weight: Tensor, sequences: ConsecutiveSequences, history: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        further = sequences.preceded(weight.shape[1] - 1)
        rows = further.filled(tokens, history)
        found = conv1d(rows.t()[None], weight[:, None], groups=len(weight))[0].t()
        return silu(found.index_select(0, further.tokens - weight.shape[1] + 1)), rows[further.last]

    def delta_rule(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        decay: Tensor,
        beta: Tensor,
        sequences: ConsecutiveSequences,
        memory: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        chunks = sequences.chunks
        query, key, value = (chunks.laid(each) for each in heads)
        repeats = value.shape[1] // key.shape[1]
        query, key = (of_length_one(each).repeat_interleave(repeats, dim=1) for each in (query, key))
        query = query * key.shape[-1] ** -0.5
        beta, passed = chunks.laid(beta)[..., None], chunks.laid(decay).cumsum(-1)
        # Decay between two tokens of a chunk. Masked before exp: later tokens would overflow.
        later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=passed.device).triu(1)
        between = (passed[..., :, None] - passed[..., None, :]).masked_fill(later, -torch.inf).exp()
        from_start = passed.exp()[..., None]
        # Each token's correction depends on those of earlier tokens: a triangular system. Its right sides are the
        # values, and what the memory at the start of the chunk returns for the keys.
        system = (key * beta) @ key.transpose(-1, -2) * between
        sides = torch.cat((value * beta, key * beta * from_start), dim=-1)
        solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
        within = query @ key.transpose(-1, -2) * between
        whole = passed[..., -1:, None]
        parts = (
            *solved.split((value.shape[-1], key.shape[-1]), dim=-1),
            within,
            query * from_start,
            (key * (whole - passed[..., None]).exp()).transpose(-1, -2),
            whole.exp(),
        )
        out, memory = _scanned(parts, chunks, memory)
        return chunks.taken(out).to(heads[2].dtype), memory


def of_length_one(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _EPSILON)


def _scanned(parts: Sequence[Tensor], chunks: Chunks, memory: Tensor | None) -> tuple[Tensor, Tensor]:
    """Carry the memories from chunk to chunk. parts: each [chunks, heads, ...]."""
    values, keys = parts[:2]
    heads, size = values.shape[1], (keys.shape[-1], values.shape[-1])
    if memory is None:
        memory = values.new_zeros(len(chunks.order) * heads, *size)
    else:
        memory = memory.index_select(0, chunks.order).flatten(0, 1)
    outs, ended = [], []
    rows = [active * heads for active in chunks.active]  # of [chunks * heads, ...], which one product needs
    for value, correction, within, query, key, decay in zip(
        *(part.flatten(0, 1).split(rows) for part in parts), strict=True
    ):
        ended.append(memory[len(value) :])
        memory = memory[: len(value)]
        new = torch.baddbmm(value, correction, memory, alpha=-1)
        outs.append(torch.baddbmm(query.bmm(memory), within, new))
        memory = torch.baddbmm(memory * decay, key, new)
    memory = torch.cat((memory, *reversed(ended))).unflatten(0, (-1, heads))
    return torch.cat(outs).unflatten(0, (-1, heads)), memory.index_select(0, chunks.place_in_order)
