"""Each policy loss equals a plain float64 computation of its paper's formula, token by token, in value and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms.loss import grpo_loss
from megatron_rl.algorithms.policy_losses import LOSSES
from megatron_rl.algorithms.trained_tokens import TrainedTokens
from megatron_rl.recipe.grpo import GrpoConfig

LENGTHS = [7, 1, 12, 0, 4, 9]


@dataclass(frozen=True)
class Token:
    """One trained token, and the sequence that it belongs to."""

    logprob: float
    old: float
    advantage: float
    weight: float
    sequence: int

    @property
    def ratio(self) -> float:
        return math.exp(self.logprob - self.old)


def policy_loss_of(config: GrpoConfig) -> Callable[[Token, Sequence[Token], float], float]:
    """Return the loss of a token from the token, its sequence's trained tokens, and the log-prob through which the
    gradient flows."""
    low, high = config.clip_range

    def surrogate(ratio: float, advantage: float) -> float:
        return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)

    def clip(token: Token, its: Sequence[Token], logprob: float) -> float:
        loss = surrogate(math.exp(logprob - token.old), token.advantage)
        if config.dual_clip and token.advantage < 0:
            loss = min(loss, -config.dual_clip * token.advantage)
        return loss

    def gspo_token(token: Token, its: Sequence[Token], logprob: float) -> float:
        shared = math.prod(one.ratio for one in its) ** (1 / len(its))
        return surrogate(shared * math.exp(logprob - token.logprob), token.advantage)

    def cispo(token: Token, its: Sequence[Token], logprob: float) -> float:
        return -min(max(token.ratio, 1 - low), 1 + high) * token.advantage * logprob

    def sapo(token: Token, its: Sequence[Token], logprob: float) -> float:
        tau = (config.sapo_tau_positive or 1.0) if token.advantage > 0 else (config.sapo_tau_negative or 1.05)
        return -4 / tau / (1 + math.exp(-tau * (math.exp(logprob - token.old) - 1))) * token.advantage

    def dppo(token: Token, its: Sequence[Token], logprob: float) -> float:
        new, old = math.exp(token.logprob), math.exp(token.old)
        distance = abs(new - old)
        if config.dppo_divergence == "kl":
            distance = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
        leaves = (token.advantage > 0 and new > old and distance > high) or (
            token.advantage < 0 and new < old and distance > low
        )
        return 0.0 if leaves else -min(token.ratio, 20.0) * token.advantage * logprob

    def reinforce(token: Token, its: Sequence[Token], logprob: float) -> float:
        return -token.advantage * logprob

    return {"clip": clip, "gspo_token": gspo_token, "cispo": cispo, "sapo": sapo, "dppo": dppo, "reinforce": reinforce}[
        config.policy_loss
    ]


CASES: dict[str, dict[str, Any]] = {
    "clip": {},
    "clip higher": {"eps_low": 0.1, "eps_high": 0.28},
    "dual clip": {"dual_clip": 1.3},
    "gspo": {"policy_loss": "gspo", "eps_low": 0.03, "eps_high": 0.04},
    "gspo as in the paper": {"policy_loss": "gspo"},
    "gspo token": {"policy_loss": "gspo_token", "eps_low": 0.03, "eps_high": 0.04},
    "cispo": {"policy_loss": "cispo"},
    "cispo within bounds": {"policy_loss": "cispo", "eps_low": 0.1, "eps_high": 0.2},
    "sapo": {"policy_loss": "sapo"},
    "sapo with other temperatures": {"policy_loss": "sapo", "sapo_tau_positive": 2.0, "sapo_tau_negative": 5.0},
    "dppo": {"policy_loss": "dppo", "eps_low": 0.04, "eps_high": 0.05},
    "dppo by kl": {"policy_loss": "dppo", "dppo_divergence": "kl", "eps_low": 0.004, "eps_high": 0.005},
    "reinforce": {"policy_loss": "reinforce"},
}
every_case = pytest.mark.parametrize("keys", CASES.values(), ids=CASES)


def batch(seed: int = 0, lengths: Sequence[int] = LENGTHS, dtype: torch.dtype = torch.float64) -> TrainedTokens:
    """Sequences of a policy some updates away from the one before the step; every fifth token carries no loss."""
    draw = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    old = -torch.randn(count, generator=draw, dtype=torch.float64).abs() - 0.1
    weights = torch.rand(count, generator=draw, dtype=torch.float64) + 0.1
    weights[::5] = 0
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    change = torch.randn(count, generator=draw, dtype=torch.float64) * 0.3
    advantages = torch.randn(count, generator=draw, dtype=torch.float64)
    return TrainedTokens(
        logprobs=(old + change).clamp(max=-0.05).to(dtype).requires_grad_(),
        old_logprobs=old.to(dtype),
        inference_logprobs=old.to(dtype),
        entropy=torch.zeros(count, dtype=dtype),
        advantages=advantages.to(dtype),
        weights=weights.to(dtype),
        sequence=sequence,
        sequences=len(lengths),
    )


def of(tokens: TrainedTokens) -> list[Token]:
    assert tokens.sequence is not None
    columns = (tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.weights, tokens.sequence)
    return [Token(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def expected(tokens: TrainedTokens, keys: dict[str, Any]) -> tuple[float, list[float]]:
    """Weighted sum of the losses, and its derivative by each log-prob, by central differences."""
    if keys.get("policy_loss") == "gspo":
        return expected_of_gspo(tokens, keys)
    each, step = of(tokens), 1e-6
    loss = policy_loss_of(GrpoConfig(**keys))
    total, gradient = 0.0, []
    for token in each:
        its = [one for one in each if one.sequence == token.sequence and one.weight]
        if not token.weight:
            gradient.append(0.0)
            continue
        total += token.weight * loss(token, its, token.logprob)
        above, below = (loss(token, its, token.logprob + change) for change in (step, -step))
        gradient.append(token.weight * (above - below) / (2 * step))
    return total, gradient


def expected_of_gspo(tokens: TrainedTokens, keys: dict[str, Any]) -> tuple[float, list[float]]:
    """The loss of a sequence depends on all its log-probs, so the derivatives are of the whole sum."""
    low, high = GrpoConfig(**keys).clip_range
    each, step = of(tokens), 1e-6

    def total(changed: int | None, change: float) -> float:
        result = 0.0
        for sequence in range(len(LENGTHS)):
            its = [
                (token.logprob + (change if index == changed else 0.0) - token.old, token)
                for index, token in enumerate(each)
                if token.sequence == sequence and token.weight
            ]
            if its:
                s = math.exp(math.fsum(log_ratio for log_ratio, _ in its) / len(its))
                clipped = min(max(s, 1 - low), 1 + high)
                result -= math.fsum(t.weight * min(s * t.advantage, clipped * t.advantage) for _, t in its)
        return result

    gradient = [(total(index, step) - total(index, -step)) / (2 * step) for index in range(len(each))]
    return total(None, 0.0), gradient


def found(tokens: TrainedTokens, keys: dict[str, Any]) -> tuple[Tensor, Tensor]:
    loss, _ = grpo_loss(tokens, GrpoConfig(**keys))
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs)
    return loss.detach(), gradient


@every_case
def test_value_and_gradient_are_those_of_the_paper(keys: dict[str, Any]) -> None:
    tokens = batch()
    total, derivatives = expected(tokens, keys)
    loss, gradient = found(tokens, keys)
    assert loss.item() == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(gradient, torch.tensor(derivatives, dtype=torch.float64), rtol=1e-6, atol=1e-8)


@every_case
def test_bounds_bind_in_these_batches_and_are_counted(keys: dict[str, Any]) -> None:
    tokens, config = batch(), GrpoConfig(**keys)
    _, stats = grpo_loss(tokens, config)
    if not config.is_bounded:
        assert (stats.clip_low, stats.clip_high) == (None, None)
        return
    assert stats.clip_high > 0 or config.policy_loss == "cispo"
    _, gradient = found(tokens, keys)
    removed = int(((gradient == 0) & (tokens.weights != 0)).sum())
    if config.policy_loss not in ("gspo", "cispo"):  # a removed token of gspo changes the ratio of the others
        assert stats.clip_low + stats.clip_high == removed


@every_case
def test_on_policy_the_gradient_is_the_policy_gradient(keys: dict[str, Any]) -> None:
    """Tokens of one sequence have the same advantage and weight here, as in a batch without branches."""
    tokens = batch()
    assert tokens.sequence is not None
    of_sequence = torch.tensor([1.0, -0.5, 0.7, 0.2, -1.2, 0.3], dtype=torch.float64)[tokens.sequence]
    weights = torch.where(tokens.weights != 0, 0.05 + 0.01 * tokens.sequence, 0.0)
    tokens = replace(tokens, old_logprobs=tokens.logprobs.detach(), advantages=of_sequence, weights=weights)
    _, gradient = found(tokens, keys)
    torch.testing.assert_close(gradient, -weights * of_sequence, rtol=1e-9, atol=1e-12)


@every_case
@examples(10)
@given(seed=st.integers(0, 10), cut=st.integers(0, len(LENGTHS)))
def test_micro_batches_of_whole_sequences_add_up_to_the_batch(keys: dict[str, Any], seed: int, cut: int) -> None:
    whole = batch(seed)
    assert whole.sequence is not None
    first = whole.sequence < cut
    parts = [whole.each(lambda values, chosen=chosen: values[chosen]) for chosen in (first, ~first)]
    loss, gradient = found(whole, keys)
    losses = [grpo_loss(part, GrpoConfig(**keys))[0] for part in parts]
    torch.testing.assert_close(sum(losses), loss, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(sum(losses), whole.logprobs)[0], gradient, rtol=1e-9, atol=1e-12)


@every_case
@pytest.mark.parametrize("log_ratio", [80.0, -80.0])
def test_extreme_changes_of_probability_have_a_finite_gradient(keys: dict[str, Any], log_ratio: float) -> None:
    tokens = batch(dtype=torch.float32)
    logprobs = torch.full_like(tokens.old_logprobs, -0.01 if log_ratio > 0 else -90.0).requires_grad_()
    tokens = replace(tokens, logprobs=logprobs, old_logprobs=logprobs.detach() - log_ratio)
    loss, gradient = found(tokens, keys)
    assert loss.isfinite() and gradient.isfinite().all()


def test_every_loss_of_the_recipe_has_a_case() -> None:
    assert {GrpoConfig(**keys).policy_loss for keys in CASES.values()} == LOSSES.keys()


@given(st.lists(st.lists(st.floats(-3, 3), max_size=5), min_size=1, max_size=5))
def test_sums_and_means_of_sequences_leave_out_tokens_without_weight(rows: list[list[float]]) -> None:
    lengths = [len(row) for row in rows]
    values = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
    tokens = batch(lengths=lengths)
    trained = (tokens.weights != 0).tolist()
    sums, means, start = [], [], 0
    for row in rows:
        kept = [value for value, is_trained in zip(row, trained[start : start + len(row)], strict=True) if is_trained]
        sums += [math.fsum(kept)] * len(row)
        means += [math.fsum(kept) / max(len(kept), 1)] * len(row)
        start += len(row)
    torch.testing.assert_close(tokens.sequence_sum(values), torch.tensor(sums, dtype=torch.float64))
    torch.testing.assert_close(tokens.sequence_mean(values), torch.tensor(means, dtype=torch.float64))
