"""Estimators of the KL divergence to the reference policy, from the log-probs of sampled tokens."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.config import KlEstimator

LARGEST_D = 20.0
"""Largest d that k3 exponentiates: exp(88) is infinite in fp32, and infinity times a gradient of 0 is NaN."""
LARGEST_K3 = 10.0
"""Largest k3 penalty of a token, reached at d = 2.61 and at d = -11. Beyond it the gradient is 0; without the bound a
single token that the policy has almost abandoned could dominate the step (at d = 15 its gradient is -3.27e6). verl,
NeMo-RL and SkyRL use the same two bounds."""


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Return the penalty of each token for deviating from the reference policy, with d = ref_logprobs - logprobs.

    As *values*, averaged over tokens sampled from the policy, k1 and k3 are unbiased for KL(policy || reference); k3 is
    never negative and has less variance; k2 has little bias while the policies are close
    (http://joschu.net/blog/kl-approx.html).

    As a *loss* they differ more, because the gradient of a sampled estimate ignores the effect on the sampling. Per
    token, with g the gradient of logprobs, and its average on policy:

        k1 = -d              g              zero: only noise. Useful as a value, not as a penalty
        k2 = d^2 / 2         -d g           the gradient of KL(policy || reference)
        k3 = exp(d) - d - 1  (1 - exp(d)) g the gradient of KL(reference || policy): the same minimum and, close
                                            to it, the same pull. Bounded: min(k3, 10), with gradient 0 above 10

    Off policy the averages are over the sampling policy. `grpo.kl_importance` multiplies the penalty by the ratio r =
    p / p(before the step), with gradient: then the value and the gradient of r k3 are those of KL(policy || reference)
    for all policies (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

    `grpo.kl_in: reward` takes the value as a cost of the sampled token. By the policy gradient k1 then has the gradient
    of KL(policy || reference) for the distribution of each token, as k2 has in the loss.

    Args:
        logprobs: [tokens], of the policy; the gradient flows here.
        ref_logprobs: [tokens], of the reference, without gradient.

    Returns:
        [tokens]
    """
    d = ref_logprobs - logprobs
    match estimator:
        case "k1":
            return -d
        case "k2":
            return d.square() / 2
        case "k3":
            d = d.clamp(max=LARGEST_D)
            return (d.expm1() - d).clamp(max=LARGEST_K3)
