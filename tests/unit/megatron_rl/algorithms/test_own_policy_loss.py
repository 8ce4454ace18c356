"""A loss of the user's: the checks that it must pass, and its place in the whole loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.loss import grpo_loss
from megatron_rl.algorithms.own_functions import check_policy_loss, own_policy_loss, sample_tokens
from megatron_rl.algorithms.trained_tokens import TrainedTokens
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.grpo import GrpoConfig

GOOD: dict[str, Callable[[Any, Any], Any]] = {
    "of tokens": lambda tokens, config: -tokens.ratio * tokens.advantages * tokens.weights,
    "of sequences": lambda tokens, config: (
        -tokens.sequence_mean(tokens.logprobs - tokens.old_logprobs).exp() * tokens.advantages * tokens.weights
    ),
}


def raises(tokens: TrainedTokens, config: GrpoConfig) -> Tensor:
    raise KeyError("nothing")


def first_as_scale(tokens: TrainedTokens, config: GrpoConfig) -> Tensor:
    return -tokens.logprobs * tokens.weights * tokens.advantages[0]


BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "too few parameters": (lambda tokens: tokens.ratio, "cannot be called as def loss"),
    "too many parameters": (lambda tokens, config, more: tokens.ratio, "cannot be called as def loss"),
    "an error": (raises, r"KeyError: 'nothing' \(for a batch of 8 tokens\)"),
    "an error for no tokens": (first_as_scale, r"IndexError: .* \(for a batch of 0 tokens\)"),
    "a float": (lambda tokens, config: 1.0, "must be a tensor.*type float"),
    "a sum": (lambda tokens, config: (tokens.ratio * tokens.weights).sum(), r"each of 8 tokens.*shape \[\]"),
    "not a number": (lambda tokens, config: tokens.ratio * tokens.weights * torch.nan, "is not finite"),
    "no gradient": (lambda tokens, config: tokens.advantages * tokens.weights, "has no gradient"),
    "only a detached gradient": (
        lambda tokens, config: tokens.ratio.detach() * tokens.weights + 0 * tokens.logprobs,
        "has no gradient",
    ),
    "an infinite gradient": (
        lambda tokens, config: (tokens.logprobs - tokens.logprobs.detach()).sqrt() * tokens.weights,
        "gradient of some tokens is not finite",
    ),
    "no weights": (lambda tokens, config: -tokens.ratio * tokens.advantages, "multiply .* by tokens.weights"),
    "a gradient without weight": (
        lambda tokens, config: tokens.logprobs.sum() * tokens.weights,
        "multiply .* by tokens.weights",
    ),
}


@pytest.mark.parametrize("loss", GOOD.values(), ids=GOOD)
def test_usable_loss_passes_the_check(loss: Callable[..., Any]) -> None:
    check_policy_loss(loss, GrpoConfig())


@pytest.mark.parametrize(("loss", "why"), BAD.values(), ids=BAD)
def test_unusable_loss_is_refused_with_the_reason(loss: Callable[..., Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_policy_loss(loss, GrpoConfig())


def test_unusable_loss_of_a_recipe_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def loss(tokens):\n    return tokens.ratio\n")
    with pytest.raises(ConfigurationError, match=r"grpo\.policy_loss: the function cannot be called"):
        own_policy_loss(GrpoConfig(policy_loss=f"{tmp_path}/mine.py:loss"))


def test_one_of_ours_is_no_own_loss() -> None:
    assert own_policy_loss(GrpoConfig(policy_loss="gspo")) is None


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"importance": {"upper": 1.0}},
        {"kl_beta": 0.3},
        {"kl_beta": 0.3, "kl_in": "reward"},
        {"kl_beta": 0.3, "kl_importance": True},
        {"entropy_coefficient": 0.1},
    ],
    ids=str,
)
def test_own_loss_equal_to_one_of_ours_trains_like_it_with_all_other_terms(
    tmp_path: Path, terms: dict[str, Any]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def loss(tokens, config):\n    return -tokens.advantages * tokens.logprobs * tokens.weights\n")
    own, ours = (GrpoConfig(policy_loss=name, **terms) for name in (f"{file}:loss", "reinforce"))
    found = []
    for config in (own, ours):
        tokens = sample_tokens(config)
        loss, stats = grpo_loss(tokens, config)
        found.append((loss.detach(), torch.autograd.grad(loss, tokens.logprobs)[0], stats.clip_low))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_all_answers_with_loss_go_through_the_model_for_an_own_loss() -> None:
    """Such a loss may train on tokens without advantage."""
    assert GrpoConfig(policy_loss="mine:loss").trains_all_answers
    assert not GrpoConfig(policy_loss="gspo").trains_all_answers
