"""Divergences between the distributions of a policy and of a teacher, at each token and over the whole vocabulary.

For a token with the policy's probabilities q and the teacher's p, over classes c that are the tokens of the vocabulary,
or the teacher's K likeliest ones and one class of all others (arXiv 2306.13649, section 2):

    forward    D = KL(p || q) = sum p log(p / q)
    reverse    D = KL(q || p) = sum q log(q / p)
    js         D = beta KL(p || m) + (1 - beta) KL(q || m), with m = beta p + (1 - beta) q

With the slopes s = q dD/dq, the gradient for the policy's logits z is s - q sum(s). As in `logprobs`, logits exist for
one chunk of tokens at a time, and no rank sees another rank's part of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from megatron_rl.algorithms import logprobs
from megatron_rl.algorithms.allowed_tokens import AllowedTokens
from megatron_rl.algorithms.logprobs import ScaledLogits
from megatron_rl.recipe.distill import DivergenceConfig

if TYPE_CHECKING:
    from megatron_rl.model.policy import OutputPart

LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class WholeVocabulary:
    """A teacher's distributions, as the input of its output layer."""

    hidden: Tensor  # [tokens, hidden of the teacher] without gradient
    output: OutputPart  # of the tokens that the policy's output layer has on this rank: see `aligned`

    def at(self, index: Tensor) -> WholeVocabulary:
        """Return those of some tokens, on the device of the index. index: [tokens]"""
        return WholeVocabulary(_rows(self.hidden, index), self.output)


@dataclass(frozen=True, slots=True)
class TopTokens:
    """A teacher's distributions over its likeliest tokens and the class of all others."""

    tokens: Tensor  # [tokens, K] int32
    logprobs: Tensor  # [tokens, K + 1] fp32, that of the others last

    def at(self, index: Tensor) -> TopTokens:
        """Return those of some tokens, on the device of the index. index: [tokens]"""
        return TopTokens(_rows(self.tokens, index), _rows(self.logprobs, index))


Distributions = WholeVocabulary | TopTokens


@dataclass(frozen=True, slots=True)
class JudgedTokens:
    """Distributions of one teacher, of all of a batch's trained tokens or of some."""

    distributions: Distributions  # [rows]
    config: DivergenceConfig
    temperature: float
    row: Tensor | None = None
    """[trained tokens] row of each, -1 for those that this teacher does not judge; None: it judges all."""

    def at(self, index: Tensor) -> JudgedTokens:
        """Return those of some tokens. index: [tokens]"""
        if self.row is None:
            return replace(self, distributions=self.distributions.at(index))
        return replace(self, row=self.row[index])

    def divergences(self, hidden: Tensor, output: OutputPart, allowed: AllowedTokens | None) -> Tensor:
        """Return the divergence of each token, 0 for those that the teacher does not judge. Arguments and collectives
        as for `divergences`."""
        if self.row is None:
            return divergences(hidden, output, self.distributions, self.config, self.temperature, allowed=allowed)
        own = (self.row >= 0).nonzero().squeeze(1)
        of_own = self.distributions.at(self.row[own])
        mask = None if allowed is None else allowed.at(own)
        found = divergences(hidden[own], output, of_own, self.config, self.temperature, allowed=mask)
        return torch.zeros(len(hidden), device=hidden.device).index_copy(0, own, found)


def divergences(
    hidden: Tensor,
    output: OutputPart,
    teacher: Distributions,
    config: DivergenceConfig,
    temperature: float,
    *,
    allowed: AllowedTokens | None = None,
) -> Tensor:
    """Return the divergence of each token, [tokens] fp32 in nats, with gradient to `hidden` and to the output layer.

    The gradient to `hidden` is that of this rank's part of the vocabulary: see `Policy.predictors`. Collective over
    `output.group`.

    Args:
        hidden: [tokens, hidden] the policy's.
        teacher: of the same tokens.
        temperature: of both distributions; 0 counts as 1.
        allowed: tokens among which each was drawn; None: all.
    """
    logits = ScaledLogits(output, temperature or 1.0, allowed)
    if isinstance(teacher, TopTokens):
        found: Tensor = _ClassLogprobs.apply(hidden, output.weight, teacher.tokens, logits)
        return _terms(config, found, teacher.logprobs).sum(1)
    of_teacher = ScaledLogits(teacher.output, temperature or 1.0, allowed)
    whole: Tensor = _WholeDivergences.apply(hidden, output.weight, teacher.hidden, logits, of_teacher, config)
    return whole


@torch.no_grad()
def top_tokens(
    hidden: Tensor, output: OutputPart, count: int, temperature: float, *, allowed: AllowedTokens | None = None
) -> TopTokens:
    """Return the `count` likeliest tokens of each distribution, fewer than the vocabulary has. Other arguments as for
    `divergences`. Collective over `output.group`."""
    logits, factor = ScaledLogits(output, temperature or 1.0, allowed), _factor(output)
    found, of_classes = [], []
    for rows in _chunks(hidden, output):
        scaled = logits.scaled(hidden, factor, rows)
        values, tokens = scaled[:, : len(output.tokens)].topk(min(count, len(output.tokens)), dim=1)
        if output.group is not None:
            missing = 0, count - values.shape[1]
            values = _gathered(pad(values, missing, value=LOWEST), output.group)
            tokens = _gathered(pad(tokens + output.tokens.start, missing), output.group)
            values, best = values.topk(count, dim=1)
            tokens = tokens.gather(1, best)
        found.append(tokens.to(torch.int32))
        of_classes.append(_of_classes(scaled, tokens, output)[0])
    return TopTokens(torch.cat(found), torch.cat(of_classes))


def aligned(teacher: OutputPart, policy: OutputPart) -> OutputPart:
    """Return the teacher's rows of the tokens whose rows of the policy this rank has, and as many as it has. Models of
    one family have embeddings of several sizes, which the ranks split at different tokens. Collective over the
    group."""
    weight, start, rows = teacher.weight.detach(), policy.tokens.start, len(policy.weight)
    if len(weight) != rows:  # on every rank, since all have equally many
        if teacher.group is not None:
            parts = [torch.empty_like(weight) for _ in range(teacher.group.size())]
            dist.all_gather(parts, weight.contiguous(), group=teacher.group)
            weight = torch.cat(parts)
        weight = weight[start : start + rows].contiguous()
        weight = pad(weight, (0, 0, 0, rows - len(weight)))
    return replace(teacher, weight=weight, tokens=policy.tokens)


class _WholeDivergences(torch.autograd.Function):
    """Divergences whose classes are the tokens of the vocabulary, in chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        of_teacher: Tensor,
        logits: ScaledLogits,
        teacher: ScaledLogits,
        config: DivergenceConfig,
    ) -> Tensor:
        output, of_chunks = logits.output, []
        factor, teachers = _factor(output), _factor(teacher.output)
        for rows in _chunks(hidden, output):
            policys = logits.scaled(hidden, factor, rows)
            mass = _log_mass(policys, output)
            judges = teacher.scaled(of_teacher, teachers, rows)
            its_mass = _log_mass(judges, output)
            of_tokens = policys.sub_(mass[:, None]), judges.sub_(its_mass[:, None])
            sums = _terms(config, *of_tokens).sum(1), _slopes(config, *of_tokens).sum(1)
            of_chunks.append(torch.stack((mass, its_mass, *sums)))
            del policys, judges, of_tokens  # before the next chunk is computed
        masses, sums = torch.cat(of_chunks, dim=1).split(2)
        if output.group is not None:
            sums = sums.contiguous()
            dist.all_reduce(sums, group=output.group)
        ctx.save_for_backward(hidden, weight, of_teacher, *masses, sums[1])
        ctx.logits, ctx.teacher, ctx.config = logits, teacher, config
        return sums[0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, of_teacher, mass, its_mass, slope = ctx.saved_tensors
        logits, teacher = ctx.logits, ctx.teacher
        gradients = _Gradients(hidden, weight, logits, ctx.needs_input_grad[1])
        teachers = _factor(teacher.output)
        for rows in _chunks(hidden, logits.output):
            policys = logits.scaled(hidden, gradients.factor, rows).sub_(mass[rows, None])
            judges = teacher.scaled(of_teacher, teachers, rows).sub_(its_mass[rows, None])
            of_logits = _slopes(ctx.config, policys, judges)
            del judges
            of_logits.addcmul_(policys.exp_(), slope[rows, None], value=-1)
            del policys
            gradients.add(rows, of_logits.mul_(gradient[rows, None]))
        return gradients.of_hidden, gradients.whole_of_weight(), *[None] * 4


class _ClassLogprobs(torch.autograd.Function):
    """Log-probs of some tokens of each distribution and of the class of all others, [tokens, K + 1], in chunks. For a
    token v of the class of others o, and with G the gradients of the log-probs:

        d L / d z_v = G_v - q_v sum(G), or for one of the others G_o q_v / q_o - q_v sum(G)
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, logits: ScaledLogits) -> Tensor:
        output, of_chunks, masses = logits.output, [], []
        factor = _factor(output)
        for rows in _chunks(hidden, output):
            found, mass = _of_classes(logits.scaled(hidden, factor, rows), tokens[rows].long(), output)
            of_chunks.append(found)
            masses.append(mass)
        ctx.save_for_backward(hidden, weight, tokens, torch.cat(masses, dim=1))
        ctx.logits = logits
        return torch.cat(of_chunks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens, masses = ctx.saved_tensors
        logits = ctx.logits
        gradients = _Gradients(hidden, weight, logits, ctx.needs_input_grad[1])
        for rows in _chunks(hidden, logits.output):
            scaled = logits.scaled(hidden, gradients.factor, rows)
            place, in_part = _places(tokens[rows].long(), logits.output)
            mass, of_others = masses[:, rows, None]
            of_logits = (scaled - of_others).exp_().masked_fill_(_held(place, in_part, scaled), 0.0)
            of_logits.mul_(gradient[rows, -1:])
            of_logits.scatter_add_(1, place, gradient[rows, :-1] * in_part)
            of_logits.addcmul_(scaled.sub_(mass).exp_(), gradient[rows].sum(1, keepdim=True), value=-1)
            del scaled
            gradients.add(rows, of_logits)
        return gradients.of_hidden, gradients.whole_of_weight(), None, None


class _Gradients:
    """Gradients of hidden states and of the output layer, the latter accumulated in fp32 over the chunks."""

    def __init__(self, hidden: Tensor, weight: Tensor, logits: ScaledLogits, of_weight: bool) -> None:
        self.factor = _factor(logits.output)
        self.of_hidden = torch.empty_like(hidden)
        self._hidden, self._weight, self._temperature = hidden, weight, logits.temperature
        self._of_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None

    def add(self, rows: slice, of_logits: Tensor) -> None:
        """of_logits: [tokens of the chunk, rows] fp32, for logits / temperature. Overwritten."""
        rounded = of_logits.div_(self._temperature).to(self.factor.dtype)
        self.of_hidden[rows] = rounded @ self.factor
        if self._of_weight is not None:
            self._of_weight += rounded.t() @ self._hidden[rows].to(self.factor.dtype)

    def whole_of_weight(self) -> Tensor | None:
        return None if self._of_weight is None else self._of_weight.to(self._weight.dtype)


def _terms(config: DivergenceConfig, policy: Tensor, teacher: Tensor) -> Tensor:
    """Return the classes' terms of the divergence; log-probs of both in any shape."""
    if config.kind == "forward":
        return teacher.exp() * (teacher - policy)
    if config.kind == "reverse":
        return policy.exp() * (policy - teacher)
    mixed = _mixed(config.beta, policy, teacher)
    of_teacher, of_policy = teacher.exp() * (teacher - mixed), policy.exp() * (policy - mixed)
    return config.beta * of_teacher + (1 - config.beta) * of_policy


def _slopes(config: DivergenceConfig, policy: Tensor, teacher: Tensor) -> Tensor:
    """Return q dD/dq of each class, up to a multiple of q, which changes no gradient for logits; arguments as for
    `_terms`."""
    if config.kind == "forward":
        return teacher.exp().neg_()
    if config.kind == "reverse":
        return policy.exp() * (policy - teacher)
    return (1 - config.beta) * policy.exp() * (policy - _mixed(config.beta, policy, teacher))


def _mixed(beta: float, policy: Tensor, teacher: Tensor) -> Tensor:
    return torch.logaddexp(policy + math.log1p(-beta), teacher + math.log(beta))


def _of_classes(scaled: Tensor, tokens: Tensor, output: OutputPart) -> tuple[Tensor, Tensor]:
    """Return the log-probs of tokens and of the class of all others, [tokens, K + 1], and the logarithms of the sums of
    exp(z) over the whole vocabulary and over the others, [2, tokens].

    scaled: [tokens, rows] z of this rank's part. tokens: [tokens, K]
    """
    place, in_part = _places(tokens, output)
    chosen = torch.where(in_part, scaled.gather(1, place), 0.0)
    if output.group is not None:
        dist.all_reduce(chosen, group=output.group)
    of_others = _log_mass(scaled.masked_fill(_held(place, in_part, scaled), LOWEST), output)
    classes = torch.cat((chosen, of_others[:, None]), dim=1)
    mass = classes.logsumexp(1)
    return classes.sub_(mass[:, None]), torch.stack((mass, of_others))


def _places(tokens: Tensor, output: OutputPart) -> tuple[Tensor, Tensor]:
    """Return the rows of tokens in this rank's part, 0 for those of other ranks, and whether they are in it."""
    place = tokens - output.tokens.start
    in_part = (place >= 0) & (place < len(output.tokens))
    return torch.where(in_part, place, 0), in_part


def _held(place: Tensor, in_part: Tensor, scaled: Tensor) -> Tensor:
    """Return whether each logit of `scaled` is that of a token at these places, [tokens, rows] bool."""
    count = torch.zeros(scaled.shape, dtype=torch.uint8, device=scaled.device)
    return count.scatter_add_(1, place, in_part.to(torch.uint8)).bool()


def _log_mass(scaled: Tensor, output: OutputPart) -> Tensor:
    """Return log sum exp(z) of each token over the whole vocabulary, [tokens]. scaled: z of this rank's part."""
    largest = scaled.amax(dim=1)
    if output.group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=output.group)
    mass = (scaled - largest[:, None]).exp_().sum(dim=1)
    if output.group is not None:
        dist.all_reduce(mass, group=output.group)
    return largest + mass.log()


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [tokens, K] of all ranks as [tokens, ranks K]."""
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def _chunks(hidden: Tensor, output: OutputPart) -> Iterator[slice]:
    """Yield chunks of tokens, at least one. They are half as large as those of log-probs, since logits of two models
    and what is made of both exist at once."""
    size = max(1, logprobs.CHUNK_BYTES // (2 * 4 * len(output.weight)))
    for first in range(0, max(1, len(hidden)), size):
        yield slice(first, first + size)


def _factor(output: OutputPart) -> Tensor:
    return output.weight.float() if output.in_fp32 else output.weight


def _rows(values: Tensor, index: Tensor) -> Tensor:
    return values[index.to(values.device)].to(index.device)
