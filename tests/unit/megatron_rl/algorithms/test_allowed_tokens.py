"""Log-probs over the tokens that a grammar allows match float64, in chunks and in parts of the vocabulary."""

from __future__ import annotations

import pytest
import torch
from test_logprobs import ROWS, TOKENS, VOCABULARY, inputs
from torch import Tensor

from megatron_rl.algorithms import logprobs as module
from megatron_rl.algorithms.allowed_tokens import AllowedTokens
from megatron_rl.algorithms.logprobs import predicted_logprobs
from megatron_rl.model.policy import OutputPart


def random_sets(targets: Tensor) -> tuple[AllowedTokens, Tensor]:
    """Sets that have each token's target, some nothing else, and some all; also as [tokens, vocabulary]."""
    draw = torch.Generator().manual_seed(5)
    may = torch.rand(TOKENS, VOCABULARY, generator=draw) < torch.tensor([0.0, 0.2, 0.8]).repeat(8)[:TOKENS, None]
    may[torch.arange(TOKENS), targets] = True
    may[3::7] = True
    wide = torch.zeros(TOKENS, 64, dtype=torch.uint8)
    wide[:, :VOCABULARY] = may
    packed = (wide.unflatten(1, (8, 8)) << torch.arange(8, dtype=torch.uint8)).sum(2, dtype=torch.uint8)
    sets = torch.cat((torch.full((1, 8), 255, dtype=torch.uint8), packed))
    of = torch.arange(1, TOKENS + 1)
    of[3::7] = 0
    return AllowedTokens(sets, of), may


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_entropy_and_gradients_match_float64(
    monkeypatch: pytest.MonkeyPatch, chunk: int, temperature: float
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * ROWS * chunk)
    hidden, weight, targets, gradient = inputs(torch.float32)
    allowed, may = random_sets(targets)
    ours = [each.clone().requires_grad_() for each in (hidden, weight)]
    output = OutputPart(ours[1], range(VOCABULARY), None)
    chosen, entropy = predicted_logprobs(ours[0], output, targets, temperature, entropy="gradient", allowed=allowed)
    assert entropy is not None
    (chosen @ gradient + entropy.sum()).backward()
    exact = [each.double().requires_grad_() for each in (hidden, weight)]
    logits = (exact[0] @ exact[1].t())[:, :VOCABULARY] / temperature
    every = torch.log_softmax(logits.masked_fill(~may, -1e300), dim=-1)
    entropies = -(every.exp() * every.masked_fill(~may, 0.0)).sum(-1)
    expected = every[torch.arange(TOKENS), targets]
    (expected @ gradient.double() + entropies.sum()).backward()
    pairs = [
        (chosen, expected),
        (entropy, entropies),
        *((one.grad, other.grad) for one, other in zip(ours, exact, strict=True)),
    ]
    for one, other in pairs:
        assert one is not None and other is not None
        torch.testing.assert_close(one.detach().double(), other.detach(), rtol=1e-5, atol=2e-5)
    alone = may.sum(1) == 1
    assert alone.any() and not chosen[alone].any()  # a token without a choice teaches nothing


def test_a_part_of_the_vocabulary_may_have_no_allowed_token() -> None:
    """Sums of such a part of a tensor-parallel rank are finite, so that they can be combined."""
    hidden, weight, targets, _ = inputs(torch.float32)
    allowed, may = random_sets(targets)
    part = range(VOCABULARY - 5, VOCABULARY)
    none = ~may[:, part.start :].any(1)
    scaled = allowed.forbid(hidden @ weight[part.start : part.stop].t(), part)
    sums = module._over_part(scaled, targets - part.start, len(part), True)
    assert none.any() and sums.isfinite().all()
    assert (sums[0][none] < -1e29).all()
