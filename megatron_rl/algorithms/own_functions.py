"""Functions of the user's that keys of `grpo` name: loaded once, checked, and called; errors name their place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.answers import ScoredAnswers
from megatron_rl.algorithms.trained_tokens import TrainedTokens
from megatron_rl.recipe.errors import ConfigurationError, task_location
from megatron_rl.recipe.grpo import GrpoConfig
from megatron_rl.recipe.own_code import is_own, load

Function = Callable[..., Any]
Check = Callable[[Function, GrpoConfig], None]


def _own_function(key: str, check: Check, config: GrpoConfig) -> Function | None:
    if not is_own(value := getattr(config, key)):
        return None
    try:
        return _checked(value, check, config)
    except ValueError as error:
        raise ConfigurationError(f"grpo.{key}: {error}") from error


@cache
def _checked(reference: str, check: Check, config: GrpoConfig) -> Function:
    found = load(reference)
    check(found, config)
    return found


def _check_signature(function: Function, config: GrpoConfig, signature: str) -> None:
    try:
        inspect.signature(function).bind(None, config)
    except TypeError as error:
        raise ValueError(f"the function cannot be called as {signature}: {error}") from error


def _called(function: Function, given: Any, config: GrpoConfig, described: str) -> Any:
    """Return the function's result. Raises ValueError, with the place in the user's code, for any error in it.

    described: what is given, in words.
    """
    try:
        return function(given, config)
    except Exception as error:  # the user's code may raise anything
        where = f"{place}: " if (place := task_location(error)) else ""
        raise ValueError(f"{where}{type(error).__name__}: {error} (for {described})") from error


def own_baseline(config: GrpoConfig) -> Callable[[ScoredAnswers, GrpoConfig], Tensor] | None:
    """Return the user's function that `grpo.baseline` names, checked: answers of the whole step -> [answers] their
    advantages. None if the baseline is one of ours. Raises ConfigurationError."""
    return _own_function("baseline", check_baseline, config)


def check_baseline(baseline: Callable[..., Any], config: GrpoConfig) -> None:
    """Call a function of the user's with a few answers and with none. Raises ValueError if it does not accept the
    arguments, raises an error, or returns something other than [answers] finite values."""
    _check_signature(baseline, config, "def advantages(answers: ScoredAnswers, config: GrpoConfig) -> Tensor")
    for answers in (sample_answers(), no_answers()):
        found = _called(baseline, answers, config, f"a step of {len(answers.rewards)} answers")
        as_advantages(found, answers)


def as_advantages(found: Any, answers: ScoredAnswers) -> Tensor:
    """Return the result of a function of the user's in fp32, without gradient. Raises ValueError if it is not one
    finite value for each answer."""
    count = len(answers.rewards)
    if not isinstance(found, Tensor):
        raise ValueError(f"the advantages must be a tensor [answers], and are of type {type(found).__name__}")
    if found.shape != (count,):
        raise ValueError(
            f"the advantages must have one value for each of {count} answers, and have the shape {[*found.shape]}"
        )
    advantages = found.detach().float()
    if not advantages.isfinite().all():
        raise ValueError(f"the advantages of some answers are not finite: {advantages[~advantages.isfinite()][:4]}")
    return advantages


def sample_answers() -> ScoredAnswers:
    """Return answers to four prompts: some are right, all are wrong, one is left, none is left. The first two are of an
    environment whose reward has components."""
    rewards = torch.tensor([1.25, 0.0, 0.25, 0.0, 0.0, 1.0])
    named = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, torch.nan])
    return ScoredAnswers(
        group=torch.tensor([0, 0, 0, 1, 1, 2]),
        num_groups=4,
        scored=rewards,
        rewards=rewards,
        accuracy=named.nan_to_num(1.0),
        tokens=torch.tensor([3, 12, 5, 7, 1, 4]),
        components={"right": named, "style": rewards - named},
        component_weights={"right": torch.tensor([1.0] * 5 + [0.0]), "style": torch.tensor([1.0] * 5 + [0.0])},
    )


def no_answers() -> ScoredAnswers:
    nothing = torch.zeros(0)
    none = torch.zeros(0, dtype=torch.long)
    return ScoredAnswers(none, 2, nothing, nothing, nothing, none, {}, {})


def own_policy_loss(config: GrpoConfig) -> Callable[[TrainedTokens, GrpoConfig], Tensor] | None:
    """Return the user's function that `grpo.policy_loss` names, checked: it returns [tokens], each token's loss times
    its weight. None if the loss is one of ours. Raises ConfigurationError."""
    return _own_function("policy_loss", check_policy_loss, config)


def check_policy_loss(loss: Callable[..., Any], config: GrpoConfig) -> None:
    """Call a loss of the user's with a tiny batch and an empty one. Raises ValueError if it does not accept the
    arguments, raises an error, returns something other than [tokens] finite values with a finite gradient, or gives a
    token of weight 0 a loss or a gradient."""
    _check_signature(loss, config, "def loss(tokens: TrainedTokens, config: GrpoConfig) -> Tensor")
    tokens = sample_tokens(config)
    values = _losses(loss, tokens, config)
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
    empty = _losses(loss, tokens.each(lambda values: values[:0]), config)
    if not empty.requires_grad:
        raise ValueError("the loss of a batch without tokens has no gradient: compute it from tokens.logprobs")


def _losses(loss: Callable[..., Any], tokens: TrainedTokens, config: GrpoConfig) -> Tensor:
    values = _called(loss, tokens, config, f"a batch of {len(tokens.logprobs)} tokens")
    return as_losses(values, tokens)


def as_losses(values: Any, tokens: TrainedTokens) -> Tensor:
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
