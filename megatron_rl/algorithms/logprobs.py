"""Log-probs of given tokens, and the entropy of the distributions they were drawn from.

The logits of all tokens are by far the largest tensor of a training pass: 12,000 tokens of a vocabulary of 152,000 take
7 GB in fp32, several times over. So they are computed chunk by chunk inside the function that needs them, discarded,
and recomputed in the backward pass. No rank sees another rank's part of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl.algorithms.allowed_tokens import AllowedTokens

if TYPE_CHECKING:
    from megatron_rl.model.policy import OutputPart

Entropy = Literal["none", "value", "gradient"]
"""Part of the entropy that is computed: nothing, its value, or its value with gradient."""

CHUNK_BYTES = 2**28
"""Bytes of a chunk's logits in fp32; about three such tensors exist at once. Smaller chunks would not keep a GPU
busy."""


def predicted_logprobs(
    hidden: Tensor,
    output: OutputPart,
    targets: Tensor,
    temperature: float,
    *,
    entropy: Entropy = "value",
    allowed: AllowedTokens | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs of the targets under softmax(logits / temperature) over the whole vocabulary, or over the tokens
    that are allowed, and that distribution's entropy in nats if requested.

    hidden [tokens, hidden], targets [tokens] -> logprobs [tokens] fp32 with gradient, entropy [tokens] fp32. The
    gradient to `hidden` is that of this rank's part of the vocabulary: see `Policy.predictors`. Temperature 0, greedy
    decoding, counts as 1. Collective over `output.group`.
    """
    chunk = max(1, CHUNK_BYTES // (4 * len(output.weight)))
    if output.group is None and len(targets) <= chunk:
        return token_logprobs(output.logits(hidden), targets, temperature, entropy=entropy, allowed=allowed)
    logits = ScaledLogits(output, temperature or 1.0, allowed)
    logprobs, entropies = _PredictedLogprobs.apply(hidden, output.weight, targets, logits, chunk, entropy)
    return logprobs, None if entropy == "none" else entropies


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy: Entropy = "value",
    allowed: AllowedTokens | None = None,
) -> tuple[Tensor, Tensor | None]:
    scaled = logits.float()
    if temperature not in (0.0, 1.0):
        scaled = scaled / temperature
    if allowed is not None:
        scaled = allowed.forbid(scaled, range(scaled.shape[1]))
    all_logprobs = torch.log_softmax(scaled, dim=-1)
    entropies = None
    if entropy != "none":
        with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
            entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return all_logprobs.gather(1, targets[:, None]).squeeze(1), entropies


class _PredictedLogprobs(torch.autograd.Function):
    """Log-probs of tokens in chunks. For a token with logits l / T = z, its target t, Z = sum exp z and p = exp(z) / Z:

        log-prob = z_t - log Z                       d log-prob / d z = onehot(t) - p
        entropy H = log Z - sum exp(z) z / Z         d H / d z = -p (log p + H)

    Every rank sums over its part of the vocabulary, relative to the largest z of that part. The parts are combined once
    for all chunks, by one maximum and one sum over the ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        logits: ScaledLogits,
        chunk: int,
        entropy: Entropy,
    ) -> tuple[Tensor, Tensor]:
        output = logits.output
        tokens, group = output.tokens, output.group
        of_chunks = []
        factor = weight.float() if output.in_fp32 else weight
        for first in range(0, max(1, len(targets)), chunk):
            rows = slice(first, first + chunk)
            scaled = logits.scaled(hidden, factor, rows)
            of_chunks.append(_over_part(scaled, targets[rows] - tokens.start, len(tokens), entropy != "none"))
            del scaled  # before the next chunk is computed
        del factor
        largest, mass, chosen, weighted = torch.cat(of_chunks, dim=1).unbind()
        if group is not None:
            # The sums of a part are relative to its own largest z; to be added they must be relative to the largest of
            # all. Example: parts with z = (3, 1) and (5) have the masses 1 + exp(-2) and 1, which relative to 5 are
            # (1 + exp(-2)) exp(-2) and 1. Each term of `weighted` also has the factor z - largest, which falls by the
            # same 2. `chosen` is z itself, in one part, and 0 in the others: rows 0 and 2 alone are scaled.
            of_part = largest.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            below = of_part - largest
            sums = torch.stack((mass, chosen, weighted + mass * below))
            sums[::2] *= below.exp()
            dist.all_reduce(sums, group=group)
            mass, chosen, weighted = sums.unbind()
        entropies = mass.log() - weighted / mass
        logprobs = chosen - largest - mass.log()
        ctx.save_for_backward(hidden, weight, targets, largest + mass.log(), entropies)
        ctx.logits, ctx.chunk, ctx.of_entropy = logits, chunk, entropy == "gradient"
        if not ctx.of_entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_mass, entropies = ctx.saved_tensors
        tokens, temperature = ctx.logits.output.tokens, ctx.logits.temperature
        of_hidden = torch.empty_like(hidden)
        factor = weight.float() if ctx.logits.output.in_fp32 else weight
        # Accumulated in fp32 over the chunks: one product over all tokens would do the same internally.
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for first in range(0, len(targets), ctx.chunk):
            rows = slice(first, first + ctx.chunk)
            of_logits = ctx.logits.scaled(hidden, factor, rows)
            of_logits.sub_(log_mass[rows, None])  # log p
            of_entropy = of_logits + entropies[rows, None] if ctx.of_entropy else None
            of_logits.exp_()
            if of_entropy is not None:
                of_entropy.mul_(of_logits).mul_((of_entropies[rows] / temperature)[:, None])
            of_logits.neg_()
            target = targets[rows] - tokens.start
            in_part = (target >= 0) & (target < len(tokens))
            of_logits.scatter_add_(1, target.clamp(0, len(weight) - 1)[:, None], in_part.to(of_logits.dtype)[:, None])
            of_logits.mul_((gradient[rows] / temperature)[:, None])
            if of_entropy is not None:
                of_logits.sub_(of_entropy)
                del of_entropy
            rounded = of_logits.to(factor.dtype)
            of_hidden[rows] = rounded @ factor
            if of_weight is not None:
                of_weight += rounded.t() @ hidden[rows].to(factor.dtype)
            del of_logits, rounded
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), *[None] * 4


@dataclass(frozen=True, slots=True)
class ScaledLogits:
    output: OutputPart
    temperature: float
    allowed: AllowedTokens | None

    def scaled(self, hidden: Tensor, weight: Tensor, rows: slice) -> Tensor:
        """Return logits / temperature of a chunk, [tokens of the chunk, rows] fp32; the lowest value for rows that pad
        the vocabulary."""
        scaled = (hidden[rows].to(weight.dtype) @ weight.t()).float()
        if self.temperature != 1.0:
            scaled.div_(self.temperature)
        if self.allowed is not None:
            scaled = self.allowed.at(rows).forbid(scaled, self.output.tokens)
        scaled[:, len(self.output.tokens) :] = torch.finfo(torch.float32).min
        return scaled


def _over_part(scaled: Tensor, target: Tensor, tokens: int, with_entropy: bool) -> Tensor:
    """Return the sums over a part of the vocabulary, [4, tokens of the chunk]: the largest z, the sum of exp(z -
    largest), z of the target (0 if it is in another part), and the sum of exp(z - largest) (z - largest) if requested.
    Overwrites `scaled`."""
    largest = scaled.amax(dim=1)
    if not tokens:  # the whole part is padding
        return torch.stack((largest, *[torch.zeros_like(largest)] * 3))
    in_part = (target >= 0) & (target < tokens)
    chosen = torch.where(in_part, scaled.gather(1, target.clamp(0, tokens - 1)[:, None]).squeeze(1), 0.0)
    below = scaled.sub_(largest[:, None])
    weights = below.exp()
    mass = weights.sum(dim=1)
    weighted = weights.mul_(below).sum(dim=1) if with_entropy else torch.zeros_like(mass)
    return torch.stack((largest, mass, chosen, weighted))
