"""A policy loss of the user's, which `grpo.policy_loss` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.algorithms.own_function import called, check_signature, own_function
from megatron_rl.algorithms.trained_tokens import TrainedTokens

OwnPolicyLoss = Callable[[TrainedTokens, GrpoConfig], Tensor]
"""Returns [tokens], each token's loss times its weight."""

SIGNATURE = "def loss(tokens: TrainedTokens, config: GrpoConfig) -> Tensor"


def own_policy_loss(config: GrpoConfig) -> OwnPolicyLoss | None:
    """Return the function of the user's that `grpo.policy_loss` names, checked by `check`; None if the loss is one of
    ours. Raises ConfigurationError."""
    return own_function("policy_loss", config.policy_loss, check, config)


def check(loss: Callable[..., Any], config: GrpoConfig) -> None:
    """Call a loss of the user's with a tiny batch and an empty one. Raises ValueError if it does not accept the
    arguments, raises an error, returns something other than [tokens] finite values with a finite gradient, or gives a
    token of weight 0 a loss or a gradient."""
    check_signature(loss, config, SIGNATURE)
    tokens = sample_tokens(config)
    values = _called(loss, tokens, config)
    if not values.isfinite().all():
        raise ValueError(f"the loss of some tokens is not finite: {_shown(values)}")
    if not values.requires_grad:
        raise ValueError("the loss has no gradient: it must depend on tokens.logprobs without detach()")
    gradient = torch.autograd.grad(values.sum(), tokens.logprobs, allow_unused=True)[0]
    if gradient is None or not gradient.any():
        raise ValueError("the loss has no gradient: it must depend on tokens.logprobs without detach()")
    if not gradient.isfinite().all():
        raise ValueError(f"the gradient of some tokens is not finite: {_shown(gradient)}")
    outside = tokens.weights == 0
    if values[outside].any() or gradient[outside].any():
        raise ValueError(
            "a token of weight 0 has a loss: multiply the loss of each token by tokens.weights, and use "
            "tokens.sequence_sum and sequence_mean, which leave such tokens out, for values of whole sequences"
        )
    empty = _called(loss, tokens.each(lambda values: values[:0]), config)
    if not empty.requires_grad:
        raise ValueError("the loss of a batch without tokens has no gradient: compute it from tokens.logprobs")


def _called(loss: Callable[..., Any], tokens: TrainedTokens, config: GrpoConfig) -> Tensor:
    values = called(loss, tokens, config, f"a batch of {len(tokens.logprobs)} tokens")
    return as_losses(values, tokens)


def as_losses(values: Any, tokens: TrainedTokens) -> Tensor:
    """Return the result of a loss of the user's. Raises ValueError if it is not one value for each token."""
    shape = (len(tokens.logprobs),)
    if not isinstance(values, Tensor):
        raise ValueError(f"the loss must be a tensor [tokens], and is of type {type(values).__name__}")
    if values.shape != shape or not values.is_floating_point():
        raise ValueError(
            f"the loss must have one floating-point value for each of {shape[0]} tokens, before any sum or mean, and "
            f"has the shape {[*values.shape]} and the type {values.dtype}"
        )
    return values


def sample_tokens(config: GrpoConfig) -> TrainedTokens:
    """Return three sequences of 4, 3 and 1 tokens with ratios on both sides of 1 and advantages of both signs. One
    token has weight 0."""
    old = torch.tensor([-0.1, -1.2, -0.7, -2.5, -0.3, -1.9, -0.8, -1.1])
    change = torch.tensor([0.0, 0.05, -0.4, 0.6, 0.0, 0.3, -0.02, 0.1])
    weights = torch.full((8,), 1 / 7)
    weights[2] = 0.0
    return TrainedTokens(
        logprobs=(old + change).requires_grad_(),
        old_logprobs=old,
        inference_logprobs=old - 0.01,
        entropy=torch.full((8,), 0.9),
        advantages=torch.tensor([1.0] * 4 + [-0.5] * 3 + [0.25]),
        weights=weights,
        ref_logprobs=old - 0.2 if config.kl_beta > 0 else None,
        answer_log_ratios=torch.full((8,), 0.01),
        answer_tokens=torch.ones(8),
        sequence=torch.tensor([0] * 4 + [1] * 3 + [2]),
        sequences=3,
    )


def _shown(values: Tensor) -> str:
    return str([round(value, 4) for value in values.tolist()])
