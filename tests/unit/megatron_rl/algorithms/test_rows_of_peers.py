"""Keys on the pages for users of verl, TRL and NeMo-RL have the loss and gradient of the peer's formula, written here
in float64 from its documentation, unless another test here compares them with the peer's own functions or their
recorded results (test_trl_parity.py, test_verl_losses.py, test_estimators.py). verl is 0.9.1 (core_algos.py,
rollout_corr_helper.py), TRL 1.16.0, NeMo-RL its loss_functions.py at commit 0069079.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import tiny_run, trajectory
from torch import Tensor

from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.algorithms.answers import scored_answers
from megatron_rl.algorithms.credit import assign_credit
from megatron_rl.algorithms.loss import grpo_loss
from megatron_rl.algorithms.loss_terms import answer_log_ratios
from megatron_rl.algorithms.own_functions import sample_answers
from megatron_rl.algorithms.reduction import local_normaliser, token_weights
from megatron_rl.algorithms.trained_tokens import TrainedTokens
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.grpo import GrpoConfig

LENGTHS = torch.tensor([5, 1, 8, 3])
OWNER = torch.arange(4).repeat_interleave(LENGTHS)


@dataclass(frozen=True)
class Sampled:
    """Tokens of four answers, [tokens] float64."""

    new: Tensor
    old: Tensor
    engine: Tensor
    ref: Tensor
    advantages: Tensor
    entropy: Tensor

    @property
    def ratio(self) -> Tensor:
        return (self.new - self.old).exp()

    @property
    def mismatch(self) -> Tensor:
        """Log ratio of the trainer to the engine."""
        return self.old - self.engine


def sampled() -> Sampled:
    draw = torch.Generator().manual_seed(3)

    def normal(scale: float) -> Tensor:
        return torch.randn(len(OWNER), generator=draw, dtype=torch.float64) * scale

    old = -normal(1).abs() - 0.1
    return Sampled(
        new=(old + normal(0.4)).requires_grad_(),
        old=old,
        engine=old + normal(0.3),
        ref=old + normal(0.5),
        advantages=torch.tensor([1.2, -0.7, -1.5, 0.4], dtype=torch.float64)[OWNER],
        entropy=normal(1).abs(),
    )


def sums(values: Tensor) -> Tensor:
    """[answers]"""
    return torch.zeros(4, dtype=values.dtype).index_add(0, OWNER, values)


def means(values: Tensor) -> Tensor:
    return sums(values) / LENGTHS


def by_token(values: Tensor) -> Tensor:
    return values.mean()


def clipped(its: Sampled, ratio: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.maximum(-its.advantages * ratio, -its.advantages * ratio.clamp(1 - low, 1 + high))


def plain(its: Sampled) -> Tensor:
    return clipped(its, its.ratio)


def k3(its: Sampled) -> Tensor:
    d = (its.ref - its.new).clamp(-20, 20)
    return (d.exp() - d - 1).clamp(-10, 10)


def inside(ratio: Tensor, low: float, high: float) -> Tensor:
    return ((ratio >= low) & (ratio <= high)).double()


def score_function(its: Sampled) -> Tensor:
    """1, with the gradient of the probability."""
    return (its.new - its.new.detach()).exp()


Peer = Callable[[Sampled], Tensor]
REJECTED = {"lower": 0.8, "upper": 1.25}

LOSSES: dict[str, tuple[dict[str, Any], Peer]] = {
    # verl
    "verl gpg": ({"policy_loss": "reinforce"}, lambda its: by_token(-its.advantages * its.new)),
    "verl kl_loss_type kl": (
        {"kl_beta": 0.2, "kl_estimator": "k1"},
        lambda its: by_token(plain(its)) + 0.2 * by_token(its.new - its.ref),
    ),
    "verl kl_loss_type mse": (
        {"kl_beta": 0.2, "kl_estimator": "k2"},
        lambda its: by_token(plain(its)) + 0.2 * by_token(0.5 * (its.new - its.ref).square()),
    ),
    # TRL
    "TRL delta": (
        {"dual_clip": 1.4},
        lambda its: by_token(
            torch.maximum(-its.advantages * its.ratio.clamp(max=1.4), -its.advantages * its.ratio.clamp(0.8, 1.2))
        ),
    ),
    # NeMo-RL
    "NeMo-RL reference_policy_kl_penalty": (
        {"kl_beta": 0.2, "kl_importance": True, "iterations": 1},
        lambda its: by_token(plain(its)) + 0.2 * by_token(score_function(its) * k3(its)),
    ),
    "NeMo-RL reference_policy_kl_type k2": (
        {"kl_beta": 0.2, "kl_estimator": "k2", "kl_importance": True},
        lambda its: by_token(plain(its)) + 0.2 * by_token(score_function(its) * (its.ref - its.new).square() / 2),
    ),
    "NeMo-RL icepop": (
        {"importance": {"lower": 0.7, "upper": 1.2}, "rejection": {"lower": 0.7, "upper": 1.2}},
        lambda its: by_token(its.mismatch.exp() * inside(its.mismatch.exp(), 0.7, 1.2) * plain(its)),
    ),
    "NeMo-RL seq-mask-tis": (
        {"importance": {"upper": 1e8}, "rejection": {"level": "geometric", **REJECTED}},
        lambda its: by_token(its.mismatch.exp() * inside(means(its.mismatch).exp(), 0.8, 1.25)[OWNER] * plain(its)),
    ),
}
ON_POLICY = {"NeMo-RL reference_policy_kl_penalty", "NeMo-RL reference_policy_kl_type k2"}
"""Rows that hold where the ratio is 1: later NeMo-RL's weight stays 1, and ours is the ratio."""


def our_tokens(its: Sampled, config: GrpoConfig) -> TrainedTokens:
    ones = torch.ones(4)
    normaliser = local_normaliser(LENGTHS, ones, config.reduction)
    weights = token_weights(LENGTHS, ones, config.reduction, normaliser, config.reduction_length or 1)
    ratios, counts = answer_log_ratios(its.mismatch, LENGTHS)
    return TrainedTokens(
        logprobs=its.new,
        old_logprobs=its.old,
        inference_logprobs=its.engine,
        entropy=its.entropy,
        advantages=its.advantages,
        weights=weights.double()[OWNER],
        ref_logprobs=its.ref,
        answer_log_ratios=ratios,
        answer_tokens=counts,
        sequence=OWNER,
        sequences=4,
    )


def on_policy(its: Sampled) -> Sampled:
    return Sampled(its.new, its.new.detach(), its.engine, its.ref, its.advantages, its.entropy)


def assert_same(its: Sampled, keys: dict[str, Any], theirs: Tensor) -> None:
    config = GrpoConfig(**keys)
    loss, _ = grpo_loss(our_tokens(its, config), config)
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6)  # weights are fp32
    found, expected = (torch.autograd.grad(one, its.new, retain_graph=True)[0] for one in (loss, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    assert expected.count_nonzero() > 1


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_the_peers_formula(name: str) -> None:
    keys, peer = LOSSES[name]
    its = on_policy(sampled()) if name in ON_POLICY else sampled()
    assert_same(its, keys, peer(its))


@pytest.mark.parametrize(
    ("level", "of_answers"),
    [
        ("token", lambda log: log),
        ("sequence", lambda log: sums(log)[OWNER]),
        ("geometric", lambda log: means(log)[OWNER]),
    ],
    ids=["token_k1", "seq_sum_k1", "seq_mean_k1"],
)
def test_verls_rejection_keeps_the_same_tokens_and_takes_the_others_out_of_the_mean(
    level: str, of_answers: Callable[[Tensor], Tensor]
) -> None:
    its, bounds = sampled(), {"lower": 0.8, "upper": 1.25}
    stays = inside(of_answers(its.mismatch).exp(), 0.8, 1.25)
    assert 0 < stays.sum() < len(stays)
    assert_same(its, {"rejection": {"level": level, **bounds}}, (plain(its) * stays).sum() / len(stays))
    theirs = (plain(its) * stays).sum() / stays.sum()  # verl: the same up to one factor
    ours = (plain(its) * stays).sum() / len(stays)
    assert theirs.item() == pytest.approx(ours.item() * len(stays) / stays.sum().item())


def test_nemo_rls_weight_of_the_penalty_by_the_engine_is_ours_by_the_policy_before_the_step() -> None:
    """The two are one where the engine reports the log-probs of the policy before the step."""
    its = sampled()
    theirs = by_token(plain(its)) + 0.2 * by_token(its.ratio * k3(its))
    assert_same(its, {"kl_beta": 0.2, "kl_importance": True}, theirs)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_penalty_in_the_reward_is_subtracted_from_the_advantage_of_its_token(estimator: str) -> None:
    """TRL's RLOO and verl subtract its sum from the reward of the answer, before advantages are normalised."""
    its = sampled()
    d = its.ref - its.old
    penalty = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - d - 1}[estimator]
    shifted = Sampled(its.new, its.old, its.engine, its.ref, its.advantages - 0.2 * penalty, its.entropy)
    assert_same(its, {"kl_beta": 0.2, "kl_in": "reward", "kl_estimator": estimator}, by_token(plain(shifted)))


# Advantages


def configured(**grpo: Any) -> RunConfig:
    return tiny_run(grpo=grpo, sampling={"max_new_tokens": 20})


def group(rewards: list[float], lengths: list[int] | None = None) -> TrajectoryGroup:
    answers = [
        trajectory([1], [2] * length, reward)
        for reward, length in zip(rewards, lengths or [3] * len(rewards), strict=True)
    ]
    return TrajectoryGroup(0, Problem("", {}), answers, {})


def test_trls_soft_punishment_is_the_penalty_of_one() -> None:
    rewards = pytest.importorskip("trl.rewards", reason="pip install -e '.[bench]'")
    lengths = [3, 12, 15, 20]
    theirs = rewards.get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=8)(
        completion_ids=[[2] * length for length in lengths], completions=None, prompts=None
    )
    config = configured(overlong={"mode": "penalty", "buffer": 8, "penalty": 1.0})
    assert scored_answers([group([0.0] * 4, lengths)], config).rewards.tolist() == pytest.approx(theirs)


def test_cut_answers_are_masked() -> None:
    """TRL's mask_truncated_completions and NeMo-RL's overlong_filtering: no loss, and the reward still counts."""
    cut = trajectory([1], [2] * 3, 0.0)
    object.__setattr__(cut, "finish_reason", "length")
    whole = TrajectoryGroup(0, Problem("", {}), [*group([1.0, 0.0]).trajectories, cut], {})
    credit = assign_credit([whole], configured(overlong={"mode": "mask"}))
    assert credit.carries_loss.tolist() == [1, 1, 0]
    assert credit.advantages[0] > 0 > credit.advantages[1]


def nemo_rl_leave_one_out(rewards: list[float]) -> list[float]:
    """Mean and sample deviation of the other answers; a deviation of 0 does not divide."""
    found = []
    for number, reward in enumerate(rewards):
        others = torch.tensor(rewards[:number] + rewards[number + 1 :], dtype=torch.float64)
        deviation = others.std().item()
        found.append((reward - others.mean().item()) / (deviation + 1e-6 if deviation > 0 else 1.0))
    return found


@pytest.mark.parametrize("rewards", [[1.0] + [0.0] * 15, [1.0, 0.0, 0.5, 1.0], [1.0, 1.0, 0.0]])
def test_the_function_on_nemo_rls_page_leaves_the_answer_out_of_the_deviation(rewards: list[float]) -> None:
    page = (Path(__file__).parents[4] / "docs" / "from-nemo-rl.md").read_text()
    source = re.search(r"^    import torch\n(?:(?:    .*)?\n)+?    +return .*\n", page, flags=re.MULTILINE)
    assert source is not None
    namespace: dict[str, Any] = {}
    exec(re.sub(r"^ {4}", "", source[0], flags=re.MULTILINE), namespace)
    answers = scored_answers([group(rewards), group([0.0, 1.0])], configured())
    answers = answers.each(lambda column: column.float() if column.is_floating_point() else column)
    found = namespace["advantages"](answers, GrpoConfig())
    expected = nemo_rl_leave_one_out(rewards) + nemo_rl_leave_one_out([0.0, 1.0])
    assert found.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert namespace["advantages"](sample_answers(), GrpoConfig()).isfinite().all()
