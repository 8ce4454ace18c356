"""Sampling of tokens from logits: temperature, top-k, top-p, min-p, the log-prob for training, and random numbers.

Random numbers are counter-based: the uniform of token t of a sample is a function of (key, sample, t) alone. So an
answer does not depend on the time, the rank, its neighbours in the batch, or where a restart interrupted it. The
generator is SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195), used as a hash.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from megatron_rl.recipe.inference import MOST_STOPS, Sampling, ends_of

BLOCKS_FROM, BLOCK = 4096, 64
"""Size of the vocabulary from which on tokens are drawn in two steps, first a block and then in it; size of a block."""

BELOW_1 = 1 - 2.0**-53

LEAST, MOST = 1e-30, 1e30
"""Bounds of a temperature or top_p above 0. Below LEAST only the likeliest token is left, above MOST all tokens are
equally likely; fp32 could not represent much smaller or larger values."""

NO_TOKEN = -1
"""Placeholder for the end tokens of an answer that no token ends."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class SamplingWork:
    """Work that sampling some rows takes. The host knows it without waiting for the device."""

    greedy: bool
    ordered: int | None
    """Number of the likeliest tokens to sort for top-k or top-p, 0 for all; None: no row uses them."""
    floor: bool
    holds: bool
    ends: int


class SamplingParameters(NamedTuple):
    temperature: Tensor
    """[rows]; 0 is greedy."""
    top_k: Tensor
    """[rows]; 0 keeps all tokens."""
    top_p: Tensor
    min_p: Tensor
    least: Tensor
    ends: Tensor
    """[rows, ends] the tokens that end an answer, padded with the first of them."""


class SamplingRows:
    """Sampling parameters of all rows of a batch, and what the host must know of them."""

    def __init__(self, rows: int, device: torch.device, end_ids: Collection[int]) -> None:
        """end_ids: at least one token that ends any answer."""
        self._end_ids = tuple(sorted(end_ids))
        self._parameters = SamplingParameters(
            temperature=torch.ones(rows, device=device),
            top_k=torch.zeros(rows, dtype=torch.long, device=device),
            top_p=torch.ones(rows, device=device),
            min_p=torch.zeros(rows, device=device),
            least=torch.zeros(rows, dtype=torch.long, device=device),
            ends=torch.zeros(rows, len(end_ids) + MOST_STOPS, dtype=torch.long, device=device),
        )
        self._greedy = np.zeros(rows, dtype=np.bool_)
        self._top_k = np.zeros(rows, dtype=np.int64)
        self._cuts_order = np.zeros(rows, dtype=np.bool_)  # whether top-k or top-p removes tokens
        self._cuts_floor = np.zeros(rows, dtype=np.bool_)  # whether min-p does
        self._different_ends = np.ones(rows, dtype=np.int64)  # number of distinct tokens in `ends`
        self._least = np.zeros(rows, dtype=np.int64)
        self._host = self._greedy, self._top_k, self._cuts_order, self._cuts_floor, self._different_ends, self._least

    def __getitem__(self, rows: slice) -> SamplingParameters:
        return SamplingParameters(*(column[rows] for column in self._parameters))

    def set(self, rows: slice, sampling: Sampling) -> None:
        columns = self._parameters
        columns.temperature[rows] = sampling.temperature and min(MOST, max(LEAST, sampling.temperature))
        columns.top_k[rows] = sampling.top_k
        columns.top_p[rows] = max(LEAST, sampling.top_p)
        columns.min_p[rows] = sampling.min_p
        columns.least[rows] = sampling.min_new_tokens
        ends = [*ends_of(sampling, self._end_ids)] or [NO_TOKEN]
        self._greedy[rows] = sampling.temperature == 0
        self._top_k[rows] = sampling.top_k
        self._cuts_order[rows] = sampling.top_k > 0 or sampling.top_p < 1
        self._cuts_floor[rows] = sampling.min_p > 0
        self._different_ends[rows] = len(ends)
        self._least[rows] = sampling.min_new_tokens
        ends += ends[:1] * (columns.ends.shape[1] - len(ends))
        columns.ends[rows] = torch.tensor(ends).to(columns.ends.device, non_blocking=True)

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64], source: Tensor, target: Tensor) -> None:
        for column in self._parameters:
            column[target] = column[source]
        for numbers in self._host:
            numbers[targets] = numbers[sources]

    def work(self, rows: slice, tokens: NDArray[np.int64]) -> SamplingWork:
        """Return the work that the next tokens of these rows take. tokens [rows]: most tokens that each answer has."""
        ordered = None
        if self._cuts_order[rows].any():
            # Sorting 150k tokens takes longer than computing their logits. If every row has a top-k, the largest one,
            # rounded up to a power of two so that recordings can be reused, is enough.
            top_k = self._top_k[rows]
            ordered = 2 ** (int(top_k.max()) - 1).bit_length() if top_k.all() else 0
        return SamplingWork(
            greedy=bool(self._greedy[rows].any()),
            ordered=ordered,
            floor=bool(self._cuts_floor[rows].any()),
            holds=bool((self._least[rows] > tokens).any()),
            ends=int(self._different_ends[rows].max()),
        )


def sample(
    logits: Tensor,
    rows: SamplingParameters,
    work: SamplingWork,
    uniform: Tensor,
    count: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    logits [rows, vocab]; uniform [rows] in [0, 1); count [rows] number of answer tokens before
    -> tokens [rows], logprobs [rows] fp32, and whether each token ends its answer [rows]

    logprobs are of softmax(logits / temperature) over the whole vocabulary, before top-k, top-p and min-p.
    Temperature 0 takes the likeliest token, and its log-prob is that of temperature 1. End tokens cannot be drawn while
    an answer has fewer than `least` tokens.

    work: at least the work that the rows need.
    """
    greedy = rows.temperature == 0
    temperature = rows.temperature.masked_fill(greedy, 1.0)[:, None]
    logits = logits.float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    if work.holds:
        # On logits, not on probabilities: without the end tokens all probabilities may be too small for fp32.
        ends = rows.ends[:, : work.ends]
        held = (count < rows.least)[:, None] & (ends != NO_TOKEN)
        ends = ends.clamp(min=0)
        logits = logits.scatter(1, ends, logits.gather(1, ends).masked_fill(held, -torch.inf))
    # The same operators for every row: so no bit of a row depends on what other rows ask for.
    probs = torch.log_softmax(logits, dim=-1).exp_() if work.holds else logprobs.exp()
    tokens = invert(keep_likely(probs, rows, work), uniform)
    if work.greedy:
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    ends = (rows.ends[:, : work.ends] == tokens[:, None]).any(1)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1), ends


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return where in each row of weights [rows, vocab] the running sum first exceeds the part `uniform` of the total:
    [rows]. uniform [rows] in [0, 1). An entry of weight 0 is never returned, unless a row is all zero or has a NaN:
    then the result is any valid index.

    Sums are in fp64, since fp32 would lose the tail of 150k tokens. Summing every token in fp64 would take longer than
    all other work on the logits, so a large vocabulary is summed by blocks first.
    """
    vocab = weights.shape[1]
    if vocab < BLOCKS_FROM:
        return _reached(weights.cumsum(-1, dtype=torch.float64), uniform)
    whole = vocab // BLOCK * BLOCK
    of_blocks = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1)
    of_blocks = torch.cat((of_blocks, weights[:, whole:].sum(-1, keepdim=True)), dim=1)
    sums = of_blocks.cumsum(-1, dtype=torch.float64)
    block = _reached(sums, uniform)[:, None]
    inside = of_blocks.gather(1, block).double()
    left = (uniform.double()[:, None] * sums[:, -1:] - sums.gather(1, block) + inside) / inside
    columns = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    of_block = weights.gather(1, columns.clamp(max=vocab - 1)).masked_fill(columns >= vocab, 0.0)
    within = _reached(of_block.cumsum(-1, dtype=torch.float64), left.squeeze(1).clamp(0, BELOW_1))
    return (block.squeeze(1) * BLOCK + within).clamp_(max=vocab - 1)


def _reached(sums: Tensor, part: Tensor) -> Tensor:
    """Return where running sums [rows, n] first exceed the part [rows] of their last value: [rows]."""
    first = torch.searchsorted(sums, part.double()[:, None] * sums[:, -1:], right=True)
    return first.squeeze(1).clamp_(max=sums.shape[1] - 1)


def keep_likely(probs: Tensor, rows: SamplingParameters, work: SamplingWork) -> Tensor:
    """Zero the probabilities [rows, vocab] that top-k, then top-p, then min-p remove. The likeliest token always stays;
    of equally likely tokens the first ones stay."""
    vocab = probs.shape[1]
    if work.ordered is not None:
        depth = min(vocab, work.ordered or vocab)
        # Only values, no indices: bf16 makes many tokens equally likely, and which of them topk puts first depends on
        # `depth`, and so on other rows.
        ordered = probs.topk(depth).values if depth < vocab else probs.sort(dim=-1, descending=True).values
        rank = torch.arange(depth, device=probs.device)
        top_k = torch.where(rows.top_k > 0, rows.top_k, vocab)[:, None]
        ordered = ordered.masked_fill(rank >= top_k, 0.0)
        mass = ordered.cumsum(-1)
        stays = (mass - ordered < rows.top_p[:, None] * mass[:, -1:]) | (rows.top_p >= 1)[:, None]
        kept = (stays & (rank < top_k)).sum(-1, keepdim=True).clamp_(min=1)
        least = ordered.gather(1, kept - 1)
        as_likely = probs == least
        beyond = as_likely.cumsum(-1, dtype=torch.int32) > kept - (ordered > least).sum(-1, keepdim=True)
        probs = probs.masked_fill((probs < least) | (as_likely & beyond), 0.0)
    if work.floor:
        probs = probs.masked_fill(probs < rows.min_p[:, None] * probs.amax(-1, keepdim=True), 0.0)
    return probs


def uniforms(keys: ArrayLike, samples: ArrayLike, count: int) -> NDArray[np.float64]:
    """Return numbers in [0, 1) with 53 random bits, [rows, count]; row i belongs to sample samples[i] of keys[i].

    keys: 64-bit, [rows] or one for all rows.
    """
    rows = _GOLDEN * (np.asarray(samples, dtype=np.uint64) + np.uint64(1))
    stream = _mix(np.asarray(keys, dtype=np.uint64) + rows)
    counters = _GOLDEN * np.arange(1, count + 1, dtype=np.uint64)
    bits = _mix(stream[:, None] + counters[None, :])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
