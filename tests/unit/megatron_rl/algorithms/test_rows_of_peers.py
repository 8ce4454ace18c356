"""Each row about advantages and losses on the pages for users of verl, TRL and NeMo-RL is true: the peer's formula,
written here in float64 from its documentation, has the loss and gradient of our keys in that row.

`ROWS` names the test of each row; `tests/lint/test_pages_for_users_of_peers.py` fails for a row without one. Where a
peer's own functions run, or their results were recorded, it names that test. verl is 0.9.1 (core_algos.py,
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
from megatron_rl.algorithms.answers import scored_answers, usable
from megatron_rl.algorithms.credit import assign_credit, estimate
from megatron_rl.algorithms.loss import grpo_loss
from megatron_rl.algorithms.loss_terms import answer_log_ratios, kl_penalty
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


def by_sequence(values: Tensor) -> Tensor:
    return means(values).mean()


def clipped(its: Sampled, ratio: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.maximum(-its.advantages * ratio, -its.advantages * ratio.clamp(1 - low, 1 + high))


def plain(its: Sampled) -> Tensor:
    return clipped(its, its.ratio)


def dual(its: Sampled, c: float) -> Tensor:
    values = plain(its)
    return torch.where(its.advantages < 0, torch.minimum(values, -its.advantages * c), values)


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
    "verl seq-mean-token-sum-norm": (
        {"reduction": "constant", "reduction_length": 8},
        lambda its: (sums(plain(its)) / 8).mean(),
    ),
    "verl entropy_coeff": (
        {"entropy_coefficient": 0.1},
        lambda its: by_token(plain(its)) - 0.1 * by_token(its.entropy),
    ),
    "verl use_kl_loss": ({"kl_beta": 0.2}, lambda its: by_token(plain(its)) + 0.2 * by_token(k3(its))),
    "verl kl_loss_type kl": (
        {"kl_beta": 0.2, "kl_estimator": "k1"},
        lambda its: by_token(plain(its)) + 0.2 * by_token(its.new - its.ref),
    ),
    "verl kl_loss_type mse": (
        {"kl_beta": 0.2, "kl_estimator": "k2"},
        lambda its: by_token(plain(its)) + 0.2 * by_token(0.5 * (its.new - its.ref).square()),
    ),
    "verl rollout_is token": (
        {"importance": {"upper": 1.2}},
        lambda its: by_token(its.mismatch.exp().clamp(max=1.2) * plain(its)),
    ),
    "verl rollout_is sequence": (
        {"importance": {"level": "sequence", "lower": 0.8, "upper": 1.2}},
        lambda its: by_token(sums(its.mismatch).clamp(-20, 20).exp().clamp(0.8, 1.2)[OWNER] * plain(its)),
    ),
    # TRL
    "TRL delta": (
        {"dual_clip": 1.4},
        lambda its: by_token(
            torch.maximum(-its.advantages * its.ratio.clamp(max=1.4), -its.advantages * its.ratio.clamp(0.8, 1.2))
        ),
    ),
    # NeMo-RL
    "NeMo-RL ratio_clip": ({"eps_high": 0.28}, lambda its: by_token(clipped(its, its.ratio, 0.2, 0.28))),
    "NeMo-RL ratio_clip_c": ({"dual_clip": 1.4}, lambda its: by_token(dual(its, 1.4))),
    "NeMo-RL token_level_loss false": ({"reduction": "sequence"}, lambda its: by_sequence(plain(its))),
    "NeMo-RL sequence_level_importance_ratios": (
        {"policy_loss": "gspo", "reduction": "sequence", "eps_low": 0.01, "eps_high": 0.02},
        lambda its: by_sequence(clipped(its, means(its.new - its.old).exp()[OWNER], 0.01, 0.02)),
    ),
    "NeMo-RL disable_ppo_ratio": ({"policy_loss": "reinforce"}, lambda its: by_token(-its.advantages * its.new)),
    "NeMo-RL reference_policy_kl_penalty": (
        {"kl_beta": 0.2, "kl_importance": True, "iterations": 1},
        lambda its: by_token(plain(its)) + 0.2 * by_token(score_function(its) * k3(its)),
    ),
    "NeMo-RL reference_policy_kl_type k2": (
        {"kl_beta": 0.2, "kl_estimator": "k2", "kl_importance": True},
        lambda its: by_token(plain(its)) + 0.2 * by_token(score_function(its) * (its.ref - its.new).square() / 2),
    ),
    "NeMo-RL use_importance_sampling_correction": (
        {"importance": {"upper": 1e6}},
        lambda its: by_token(its.mismatch.exp() * plain(its)),
    ),
    "NeMo-RL tis": (
        {"importance": {"lower": 0.8, "upper": 1.2}},
        lambda its: by_token(its.mismatch.exp().clamp(0.8, 1.2) * plain(its)),
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


def test_the_bounds_of_the_penalty_are_nemo_rls_for_k3_and_none_for_the_others() -> None:
    far = torch.tensor([-40.0, -5.0, 5.0, 40.0], dtype=torch.float64)
    zero = torch.zeros_like(far)
    its = Sampled(zero.clone().requires_grad_(), zero, zero, far, zero + 1, zero)
    d = far.clamp(-20, 20)
    of_k3 = (d.exp() - d - 1).clamp(-10, 10)
    found = [penalty_of(its, name) for name in ("k1", "k2", "k3")]
    assert found[2].tolist() == pytest.approx(of_k3.tolist())
    assert found[0].tolist() == pytest.approx((-far).tolist()) and found[1].tolist() == pytest.approx(
        (far**2 / 2).tolist()
    )


def penalty_of(its: Sampled, estimator: Any) -> Tensor:
    return kl_penalty(its.new, its.ref, estimator).detach()


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


def test_groups_without_a_difference_of_accuracy_are_filtered() -> None:
    """verl's filter_groups keeps prompts whose metric has a deviation above 0; NeMo-RL's dynamic sampling as well."""
    config = configured(dynamic_sampling={"enabled": True})
    for rewards in ([1.0, 1.0, 1.0], [0.0, 0.0], [1.0, 0.0, 0.0]):
        assert usable(group(rewards), config) == (torch.tensor(rewards).std(correction=0).item() > 0)


def test_the_penalty_on_overlong_answers_is_linear_over_the_buffer() -> None:
    """verl: min(-(length - (max - buffer)) / buffer * factor, 0)."""
    lengths = [3, 12, 15, 20]
    config = configured(overlong={"mode": "penalty", "buffer": 8, "penalty": 0.5})
    found = scored_answers([group([1.0, 0.0, 1.0, 0.0], lengths)], config).rewards.tolist()
    theirs = [min(-(length - (20 - 8)) / 8 * 0.5, 0) for length in lengths]
    assert found == pytest.approx([reward + one for reward, one in zip([1, 0, 1, 0], theirs, strict=True)])


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


def test_rewards_are_weighed_and_added() -> None:
    """TRL: (rewards_per_func * weights).nansum(1)."""
    answers = group([0.0, 0.0]).trajectories
    for one, parts in zip(answers, ({"right": 1.0, "style": 0.5}, {"right": 0.0, "style": 1.0}), strict=True):
        object.__setattr__(one, "components", parts)
    config = tiny_run(environment={"reward_weights": {"right": 1.0, "style": 0.2}})
    assert scored_answers([TrajectoryGroup(0, Problem("", {}), answers, {})], config).rewards.tolist() == [1.1, 0.2]


def test_nemo_rls_normalised_rewards_are_divided_by_the_samples_deviation() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5], dtype=torch.float64)
    config = configured(advantage_std="sample")
    found = estimate(scored_answers([group(rewards.tolist())], config), config.grpo)
    expected = (rewards - rewards.mean()) / rewards.std()
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-3)


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


HERE = "test_rows_of_peers.py"
FORMULA = (HERE, "test_loss_and_gradient_are_those_of_the_peers_formula")
REJECTION = (HERE, "test_verls_rejection_keeps_the_same_tokens_and_takes_the_others_out_of_the_mean")
FILTER = (HERE, "test_groups_without_a_difference_of_accuracy_are_filtered")
PENALTY = (HERE, "test_the_penalty_on_overlong_answers_is_linear_over_the_buffer")
CUT = (HERE, "test_cut_answers_are_masked")
VERL_ADVANTAGES = ("test_estimators.py", "test_equals_verl_up_to_the_added_constants")
VERL_LOSSES = ("test_verl_losses.py", "test_loss_and_gradient_equal_those_of_verl")
TRL_ADVANTAGES = ("test_estimators.py", "test_equals_trl")
TRL_LOSSES = ("test_trl_parity.py", "test_loss_gradient_and_metrics_equal_trl")

ROWS: dict[str, dict[str, tuple[str, str]]] = {
    "from-verl.md": {
        "algorithm.adv_estimator=grpo": VERL_ADVANTAGES,
        "algorithm.norm_adv_by_std_in_grpo=False": VERL_ADVANTAGES,
        "algorithm.adv_estimator=rloo": VERL_ADVANTAGES,
        "algorithm.adv_estimator=reinforce_plus_plus": VERL_ADVANTAGES,
        "algorithm.adv_estimator=reinforce_plus_plus_baseline": VERL_ADVANTAGES,
        "algorithm.adv_estimator=gdpo": VERL_ADVANTAGES,
        "algorithm.filter_groups.enable": FILTER,
        "algorithm.filter_groups.metric": FILTER,
        "algorithm.filter_groups.max_num_gen_batches": FILTER,
        "reward_kwargs.overlong_buffer_cfg": PENALTY,
        "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla": VERL_LOSSES,
        "...loss_mode=gspo": VERL_LOSSES,
        "...loss_mode=cispo": VERL_LOSSES,
        "...loss_mode=dppo_tv": VERL_LOSSES,
        "...loss_mode=gpg": FORMULA,
        "actor_rollout_ref.actor.clip_ratio_low": VERL_LOSSES,
        "actor_rollout_ref.actor.clip_ratio_c": VERL_LOSSES,
        "actor_rollout_ref.actor.tau_pos": VERL_LOSSES,
        "actor_rollout_ref.actor.loss_agg_mode=token-mean": VERL_LOSSES,
        "...loss_agg_mode=seq-mean-token-mean": VERL_LOSSES,
        "...loss_agg_mode=seq-mean-token-sum-norm": FORMULA,
        "actor_rollout_ref.actor.entropy_coeff": FORMULA,
        "actor_rollout_ref.actor.use_kl_loss": FORMULA,
        "actor_rollout_ref.actor.kl_loss_type": FORMULA,
        "algorithm.use_kl_in_reward": (
            HERE,
            "test_the_penalty_in_the_reward_is_subtracted_from_the_advantage_of_its_token",
        ),
        "algorithm.rollout_correction.rollout_is": FORMULA,
        "algorithm.rollout_correction.rollout_rs": REJECTION,
    },
    "from-trl.md": {
        'scale_rewards="group"': TRL_ADVANTAGES,
        'scale_rewards="batch"': TRL_ADVANTAGES,
        'scale_rewards="none"': TRL_ADVANTAGES,
        "reward_weights": (HERE, "test_rewards_are_weighed_and_added"),
        'multi_objective_aggregation="normalize_then_sum"': TRL_ADVANTAGES,
        "mask_truncated_completions": CUT,
        "RLOOConfig": TRL_ADVANTAGES,
        "normalize_advantages": TRL_ADVANTAGES,
        "get_soft_overlong_punishment": (HERE, "test_trls_soft_punishment_is_the_penalty_of_one"),
        'loss_type="dapo"': TRL_LOSSES,
        'loss_type="grpo"': TRL_LOSSES,
        'loss_type="dr_grpo"': TRL_LOSSES,
        'loss_type="bnpo"': TRL_LOSSES,
        'loss_type="cispo"': ("test_trl_parity.py", "test_other_losses_equal_trl"),
        'importance_sampling_level="sequence"': ("test_trl_parity.py", "test_other_losses_equal_trl"),
        "epsilon": TRL_LOSSES,
        "delta": FORMULA,
        "sapo_temperature_pos": ("test_trl_parity.py", "test_other_losses_equal_trl"),
        "beta": TRL_LOSSES,
        "use_bias_correction_kl": TRL_LOSSES,
        "entropy_coef": ("test_trl_parity.py", "test_entropy_bonus_equals_that_of_trl"),
        "vllm_importance_sampling_correction": TRL_LOSSES,
        "vllm_importance_sampling_mode": TRL_LOSSES,
        "vllm_importance_sampling_clip_min": TRL_LOSSES,
    },
    "from-nemo-rl.md": {
        "grpo.use_leave_one_out_baseline=true": (
            HERE,
            "test_the_function_on_nemo_rls_page_leaves_the_answer_out_of_the_deviation",
        ),
        "grpo.normalize_rewards=true": (
            HERE,
            "test_nemo_rls_normalised_rewards_are_divided_by_the_samples_deviation",
        ),
        "grpo.use_dynamic_sampling": FILTER,
        "grpo.dynamic_sampling_max_gen_batches": FILTER,
        "grpo.overlong_filtering": CUT,
        "grpo.reward_shaping.overlong_buffer_length": PENALTY,
        "loss_fn.ratio_clip_min": FORMULA,
        "loss_fn.ratio_clip_c": FORMULA,
        "loss_fn.token_level_loss=true": FORMULA,
        "loss_fn.sequence_level_importance_ratios=true": FORMULA,
        "loss_fn.disable_ppo_ratio=true": FORMULA,
        "loss_fn.reference_policy_kl_penalty": FORMULA,
        "loss_fn.reference_policy_kl_type": FORMULA,
        "loss_fn.kl_input_clamp_value": (
            HERE,
            "test_the_bounds_of_the_penalty_are_nemo_rls_for_k3_and_none_for_the_others",
        ),
        "loss_fn.use_on_policy_kl_approximation": (
            HERE,
            "test_nemo_rls_weight_of_the_penalty_by_the_engine_is_ours_by_the_policy_before_the_step",
        ),
        "loss_fn.use_kl_in_reward": (
            HERE,
            "test_the_penalty_in_the_reward_is_subtracted_from_the_advantage_of_its_token",
        ),
        "loss_fn.use_importance_sampling_correction": FORMULA,
        "loss_fn.truncated_importance_sampling_ratio": FORMULA,
        "loss_fn.truncated_importance_sampling_ratio_min": FORMULA,
        "loss_fn.truncated_importance_sampling_type=tis": FORMULA,
        "loss_fn.truncated_importance_sampling_type=icepop": FORMULA,
        "loss_fn.truncated_importance_sampling_type=seq-mask-tis": FORMULA,
    },
}
"""Page -> first name of a row -> file of this folder, and the test in it."""
