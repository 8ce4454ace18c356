"""KL estimators: their expected values, and the expectation of their gradients."""

import math

import pytest
import torch

from megatron_rl.algorithms.loss_terms import kl_penalty


@pytest.fixture
def policies():
    """Logits of a policy and log-probs of a reference over the same nine tokens."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, generator=generator, dtype=torch.float64)
    reference = torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0)
    return logits.requires_grad_(), reference


def mean_over_samples(logits, reference, estimator):
    """Expected penalty of a token sampled from the policy, the sampling itself without gradient."""
    logprobs = logits.log_softmax(0)
    return (logprobs.exp().detach() * kl_penalty(logprobs, reference, estimator)).sum()


def gradient(value, logits):
    return torch.autograd.grad(value, logits)[0]


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_values(policies, estimator):
    logits, reference = policies
    torch.testing.assert_close(mean_over_samples(logits, reference, estimator), kl(logits.log_softmax(0), reference))


def test_as_a_loss_k1_has_no_expected_gradient(policies):
    logits, reference = policies
    torch.testing.assert_close(
        gradient(mean_over_samples(logits, reference, "k1"), logits), torch.zeros(9, dtype=torch.float64)
    )


def test_as_a_loss_k2_follows_the_gradient_of_kl_policy_to_reference(policies):
    logits, reference = policies
    expected = gradient(kl(logits.log_softmax(0), reference), logits)
    torch.testing.assert_close(gradient(mean_over_samples(logits, reference, "k2"), logits), expected)


def test_as_a_loss_k3_follows_the_gradient_of_kl_reference_to_policy(policies):
    logits, reference = policies
    expected = gradient(kl(reference, logits.log_softmax(0)), logits)
    torch.testing.assert_close(gradient(mean_over_samples(logits, reference, "k3"), logits), expected)


def test_k3_is_accurate_close_to_the_reference():
    """exp(d) - d - 1 loses all of them in fp32 at d = 1e-4; its series d^2/2 + d^3/6 does not."""
    d = 1e-4
    value = kl_penalty(torch.tensor([0.0]), torch.tensor([d]), "k3").item()
    assert value == pytest.approx(d**2 / 2 + d**3 / 6, rel=2e-3)


@pytest.mark.parametrize("d", [-40.0, -11.1, -10.9, -2.0, 1.0, 2.6, 2.62, 15.0, 30.0, 200.0])
def test_k3_is_bounded_and_has_no_gradient_beyond_its_bound(d):
    logprobs = torch.tensor([0.0]).requires_grad_()
    penalty = kl_penalty(logprobs, torch.tensor([d]), "k3")
    penalty.sum().backward()
    exact = math.exp(d) - d - 1
    assert penalty.item() == pytest.approx(min(exact, 10.0), rel=1e-5)
    assert logprobs.grad.item() == pytest.approx(1 - math.exp(d) if exact < 10 else 0.0, rel=1e-5)
