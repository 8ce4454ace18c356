"""From logits to tokens: temperature, top-k, top-p, min-p, the log-prob that training will see, and the random numbers.

These are counter-based: the uniform of token t of a sample is a function of (key, sample, t) alone. So an answer does
not depend on the time, the rank, its neighbours in the batch or where a restart cut it. The generator is SplitMix64
(Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195) used as a hash.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from megatron_rl.inference.config import MOST_STOPS, Sampling, ends_of

BLOCKS_FROM, BLOCK = 4096, 64
"""Tokens from which on they are drawn by blocks, and those of a block."""

BELOW_1 = 1 - 2.0**-53

LEAST, MOST = 1e-30, 1e30
"""Of a temperature or top_p above 0: below LEAST the likeliest token alone is left, beyond MOST all tokens are alike,
and fp32 knows neither much less nor much more."""

NO_TOKEN = -1
"""Stands for the end tokens of an answer that none ends."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class SamplingWork:
    """What has to be computed to sample some rows, as the host knows it: it need not wait for the device to know."""

    greedy: bool
    """The likeliest token of each: a temperature is 0."""
    ordered: int | None
    """So many of the likeliest tokens in order, 0 for all: top-k or top-p cut something away. None: none."""
    floor: bool
    """What min-p cuts away."""
    holds: bool
    """What is left without end tokens: an answer may not end yet."""
    ends: int
    """How many columns of `SamplingRows.ends` differ."""


@dataclass(slots=True)
class SamplingRows:
    """Sampling parameters of every row of a batch, each [rows], and what they ask for, on the host."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    greedy: NDArray[np.bool_]
    """Whether the temperature is 0."""
    likeliest: NDArray[np.int64]
    """top_k: how many tokens need be put in order."""
    cuts_order: NDArray[np.bool_]
    """Whether top-k or top-p cut anything away."""
    cuts_floor: NDArray[np.bool_]
    """Whether min-p does."""
    least: Tensor
    """min_new_tokens."""
    ends: Tensor
    """[rows, ends] the tokens that end an answer, then the first of them again and again."""
    different_ends: NDArray[np.int64]
    """How many of `ends` differ."""
    holds: NDArray[np.int64]
    """min_new_tokens: up to which an answer may not end."""
    end_ids: tuple[int, ...]
    """Those that end any answer."""

    @classmethod
    def empty(cls, rows: int, device: torch.device, end_ids: Collection[int]) -> SamplingRows:
        """end_ids: at least one token that ends any answer."""
        return cls(
            temperature=torch.ones(rows, device=device),
            top_k=torch.zeros(rows, dtype=torch.long, device=device),
            top_p=torch.ones(rows, device=device),
            min_p=torch.zeros(rows, device=device),
            greedy=np.zeros(rows, dtype=np.bool_),
            likeliest=np.zeros(rows, dtype=np.int64),
            cuts_order=np.zeros(rows, dtype=np.bool_),
            cuts_floor=np.zeros(rows, dtype=np.bool_),
            least=torch.zeros(rows, dtype=torch.long, device=device),
            ends=torch.zeros(rows, len(end_ids) + MOST_STOPS, dtype=torch.long, device=device),
            different_ends=np.ones(rows, dtype=np.int64),
            holds=np.zeros(rows, dtype=np.int64),
            end_ids=tuple(sorted(end_ids)),
        )

    def __getitem__(self, rows: slice) -> SamplingRows:
        return SamplingRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.greedy[rows],
            self.likeliest[rows],
            self.cuts_order[rows],
            self.cuts_floor[rows],
            self.least[rows],
            self.ends[rows],
            self.different_ends[rows],
            self.holds[rows],
            self.end_ids,
        )

    def set(self, rows: slice, sampling: Sampling) -> None:
        self.temperature[rows] = sampling.temperature and min(MOST, max(LEAST, sampling.temperature))
        self.top_k[rows] = sampling.top_k
        self.top_p[rows] = max(LEAST, sampling.top_p)
        self.min_p[rows] = sampling.min_p
        self.greedy[rows] = sampling.temperature == 0
        self.likeliest[rows] = sampling.top_k
        self.cuts_order[rows] = sampling.top_k > 0 or sampling.top_p < 1
        self.cuts_floor[rows] = sampling.min_p > 0
        self.least[rows] = sampling.min_new_tokens
        self.holds[rows] = sampling.min_new_tokens
        ends = [*ends_of(sampling, self.end_ids)] or [NO_TOKEN]
        self.different_ends[rows] = len(ends)
        ends += ends[:1] * (self.ends.shape[1] - len(ends))
        self.ends[rows] = torch.tensor(ends).to(self.ends.device, non_blocking=True)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy the rows `sources` to the rows `targets`."""
        source, target = (torch.tensor(rows).to(self.top_k.device, non_blocking=True) for rows in (sources, targets))
        for column in (self.temperature, self.top_k, self.top_p, self.min_p, self.least, self.ends):
            column[target] = column[source]
        for asked in (
            self.greedy, self.likeliest, self.cuts_order, self.cuts_floor, self.different_ends, self.holds,
        ):  # fmt: skip
            asked[targets] = asked[sources]

    def work(self, rows: slice, tokens: NDArray[np.int64]) -> SamplingWork:
        """What the next tokens of these rows take. tokens [rows]: that their answers have, at most."""
        ordered = None
        if self.cuts_order[rows].any():
            # To sort 150k tokens takes longer than to compute them; where every row keeps few, those are enough. A
            # power of two, of which there are few.
            likeliest = self.likeliest[rows]
            ordered = 2 ** (int(likeliest.max()) - 1).bit_length() if likeliest.all() else 0
        return SamplingWork(
            greedy=bool(self.greedy[rows].any()),
            ordered=ordered,
            floor=bool(self.cuts_floor[rows].any()),
            holds=bool((self.holds[rows] > tokens).any()),
            ends=int(self.different_ends[rows].max()),
        )


def sample(
    logits: Tensor,
    rows: SamplingRows,
    work: SamplingWork,
    uniform: Tensor,
    count: Tensor,
    adjusted: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    logits [rows, vocab], uniform [rows] in [0, 1), count [rows] tokens of the answers before, adjusted [rows, vocab]
    logits to draw by instead, equal to `logits` in rows that ask for no adjustment
    -> tokens [rows], logprobs [rows] fp32, and which tokens end their answers, [rows]

    logprobs are of softmax(logits / temperature) over the whole vocabulary, whatever is adjusted and top-k, top-p or
    min-p then cut away. Temperature 0 takes the likeliest token and counts as temperature 1 for the log-prob. For what
    is drawn the end tokens are not there where an answer has fewer than `least` tokens.

    work: what the rows ask for, all of it at least.
    """
    greedy = rows.temperature == 0
    temperature = rows.temperature.masked_fill(greedy, 1.0)[:, None]
    logits = logits.float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    if adjusted is not None:
        logits = adjusted / temperature
    if work.holds:
        # Not by their probabilities: what is left of those may all be too small for fp32.
        ends = rows.ends[:, : work.ends]
        held = (count < rows.least)[:, None] & (ends != NO_TOKEN)
        ends = ends.clamp(min=0)
        logits = logits.scatter(1, ends, logits.gather(1, ends).masked_fill(held, -torch.inf))
    # By the same operators, so that no bit of a row depends on what others ask for.
    probs = torch.log_softmax(logits, dim=-1).exp_() if work.holds or adjusted is not None else logprobs.exp()
    tokens = invert(keep_likely(probs, rows, work), uniform)
    if work.greedy:
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    ends = (rows.ends[:, : work.ends] == tokens[:, None]).any(1)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1), ends


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Where in each row of weights [rows, vocab] more than the part `uniform` of its sum is reached: [rows]. uniform
    [rows] in [0, 1). No place without weight is one of them, unless none has any or some weight is NaN: then it is any
    place of the row, for whoever looks it up.

    Sums are in fp64, as fp32 would lose the tail of 150k tokens. To make them of every token would take longer than
    all else that is done to the logits, so of many tokens the block is found first.
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
    places = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    of_block = weights.gather(1, places.clamp(max=vocab - 1)).masked_fill(places >= vocab, 0.0)
    within = _reached(of_block.cumsum(-1, dtype=torch.float64), left.squeeze(1).clamp(0, BELOW_1))
    return (block.squeeze(1) * BLOCK + within).clamp_(max=vocab - 1)


def _reached(sums: Tensor, part: Tensor) -> Tensor:
    """[rows] of running sums [rows, n]: where they are first beyond that part, [rows], of the last one."""
    first = torch.searchsorted(sums, part.double()[:, None] * sums[:, -1:], right=True)
    return first.squeeze(1).clamp_(max=sums.shape[1] - 1)


def keep_likely(probs: Tensor, rows: SamplingRows, work: SamplingWork) -> Tensor:
    """Zero what top-k, then top-p, then min-p cut away; [rows, vocab]. The likeliest token always stays, and of equally
    likely ones the first do."""
    vocab = probs.shape[1]
    if work.ordered is not None:
        depth = min(vocab, work.ordered or vocab)
        # How likely they are, and not which they are: of equally likely ones, of which bf16 makes many, it depends on
        # `depth`, and so on other rows, which come first.
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
    """[rows, count] numbers in [0, 1) with 53 random bits; row i belongs to sample samples[i] of keys[i].

    keys: of 64 bits, [rows] or one for all rows.
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
