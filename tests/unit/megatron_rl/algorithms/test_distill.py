"""The teacher's part of the advantages gives the gradient of the reverse KL divergence."""

from __future__ import annotations

import math

import torch

from megatron_rl.algorithms.loss import grpo_loss, teacher_advantages
from megatron_rl.algorithms.trained_tokens import LOG_RATIO_LIMIT, TrainedTokens
from megatron_rl.recipe.grpo import GrpoConfig


def test_the_expected_gradient_is_that_of_the_reverse_kl_divergence() -> None:
    """The gradients of the losses of seven tokens at one position, weighted by their probabilities, add up to the exact
    gradient of KL(policy || teacher), in float64."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(7, generator=generator, dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    old = logprobs.detach()
    tokens = TrainedTokens(
        logprobs=logprobs,
        old_logprobs=old,
        inference_logprobs=old,
        entropy=torch.zeros(7, dtype=torch.float64),
        advantages=teacher_advantages(teacher, old),
        weights=old.exp(),
    )
    (ours,) = torch.autograd.grad(grpo_loss(tokens, GrpoConfig())[0], logits)
    exact = (torch.log_softmax(logits, 0).exp() * (torch.log_softmax(logits, 0) - teacher)).sum()
    (expected,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def test_values_without_a_logarithm_stay_finite() -> None:
    teacher = torch.tensor([-math.inf, math.nan, -1.0, -2.0])
    old = torch.tensor([-1.0, -1.0, math.nan, -3.0])
    assert teacher_advantages(teacher, old).tolist() == [-LOG_RATIO_LIMIT, 0.0, 0.0, 1.0]
