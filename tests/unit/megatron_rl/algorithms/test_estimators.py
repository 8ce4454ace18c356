"""Advantage estimators equal their papers' formulas in float64, and the functions of verl. Those that promise
the gradient of an objective have it over all outcomes."""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms.answers import ScoredAnswers
from megatron_rl.algorithms.credit import estimate, reads_batch
from megatron_rl.recipe.grpo import GrpoConfig

RECIPES: dict[str, dict[str, Any]] = {
    "group": {},
    "group sample": {"advantage_std": "sample"},
    "group none": {"advantage_std": "none"},
    "group over batch": {"advantage_std": "sample", "advantage_std_of": "batch"},
    "group over batch tokens": {"advantage_std_of": "batch", "batch_over": "tokens"},
    "group whitened": {"advantage_std": "sample", "advantage_std_of": "advantages", "batch_over": "tokens"},
    "leave one out": {"baseline": "leave_one_out", "advantage_std": "none"},
    "leave one out divided": {"baseline": "leave_one_out"},
    "leave one out whitened": {
        "baseline": "leave_one_out",
        "advantage_std": "sample",
        "advantage_std_of": "advantages",
    },
    "batch": {"baseline": "batch", "advantage_std": "sample"},
    "batch none": {"baseline": "batch", "advantage_std": "none"},
    "batch tokens": {"baseline": "batch", "advantage_std": "sample", "batch_over": "tokens"},
    "maxrl": {"baseline": "maxrl", "advantage_std": "none"},
    "pass at 2": {"baseline": "pass_at_k", "pass_k": 2},
    "pass at 3": {"baseline": "pass_at_k", "pass_k": 3, "advantage_std": "none"},
    "per reward": {"baseline": "per_reward", "advantage_std": "sample"},
    "per reward tokens": {"baseline": "per_reward", "batch_over": "tokens"},
}
OWN_GROUP = [name for name, keys in RECIPES.items() if not reads_batch(GrpoConfig(**keys))]
SHIFTED = [name for name in RECIPES if name not in ("maxrl", "per reward", "per reward tokens")]


def recipe(name: str) -> GrpoConfig:
    return GrpoConfig(**RECIPES[name])


def table(
    rewards: list[float],
    group: list[int],
    tokens: list[int] | None = None,
    components: dict[str, list[float]] | None = None,
    weights: dict[str, list[float]] | None = None,
    groups: int | None = None,
) -> ScoredAnswers:
    values = torch.tensor(rewards, dtype=torch.float32)
    return ScoredAnswers(
        group=torch.tensor(group, dtype=torch.long),
        num_groups=1 + max(group, default=-1) if groups is None else groups,
        scored=values,
        rewards=values,
        accuracy=values,
        tokens=torch.tensor(tokens or [1] * len(rewards), dtype=torch.long),
        components={name: torch.tensor(its, dtype=torch.float32) for name, its in (components or {}).items()},
        component_weights={name: torch.tensor(its, dtype=torch.float32) for name, its in (weights or {}).items()},
    )


def mean(values: list[float], counts: list[int]) -> float:
    return math.fsum(v * c for v, c in zip(values, counts, strict=True)) / max(1, sum(counts))


def spread(values: list[float], counts: list[int], std: str) -> float:
    centre = mean(values, counts)
    squares = math.fsum(c * (v - centre) ** 2 for v, c in zip(values, counts, strict=True))
    return math.sqrt(squares / max(1, sum(counts) - (std == "sample")))


def by_hand(answers: ScoredAnswers, config: GrpoConfig) -> list[float]:
    """The papers' formulas, one Python float at a time."""
    rewards, group = answers.rewards.tolist(), answers.group.tolist()
    ones, std = [1] * len(rewards), config.advantage_std
    counts = answers.tokens.tolist() if config.batch_over == "tokens" else ones
    members = {its: [i for i, other in enumerate(group) if other == its] for its in group}

    def relative(values: list[float], divide: str) -> list[float]:
        found = []
        for i, its in enumerate(group):
            of_group = [values[j] for j in members[its]]
            centre = mean(of_group, [1] * len(of_group))
            divisor = 1e-4 + spread(of_group, [1] * len(of_group), divide) if divide != "none" else 1.0
            found.append((values[i] - centre) / divisor)
        return found

    own = std if config.advantage_std_of == "baseline" else "none"
    match config.baseline:
        case "group":
            found = relative(rewards, own)
        case "leave_one_out":
            found = []
            for i, its in enumerate(group):
                others = [rewards[j] for j in members[its] if j != i]
                of_group = [rewards[j] for j in members[its]]
                divisor = 1e-4 + spread(of_group, [1] * len(of_group), own) if own != "none" else 1.0
                found.append((rewards[i] - sum(others) / len(others)) / divisor if others else 0.0)
        case "batch":
            centre = mean(rewards, counts)
            divisor = 1e-4 + spread(rewards, counts, own) if own != "none" else 1.0
            found = [(reward - centre) / divisor for reward in rewards]
        case "maxrl":
            found = []
            for i, its in enumerate(group):
                centre = sum(rewards[j] for j in members[its]) / len(members[its])
                found.append((rewards[i] - centre) / centre if centre else 0.0)
        case "pass_at_k":
            assert config.pass_k is not None
            found = []
            for i, its in enumerate(group):
                sets = [*combinations(members[its], min(config.pass_k, len(members[its])))]
                best = [max(rewards[j] for j in chosen) for chosen in sets]
                containing = [b for b, chosen in zip(best, sets, strict=True) if i in chosen]
                divisor = 1e-4 + spread(best, [1] * len(best), "population") if own != "none" else 1.0
                found.append((sum(containing) / len(containing) - sum(best) / len(best)) / divisor)
        case "per_reward":
            found = [0.0] * len(rewards)
            for name, weights in answers.component_weights.items():
                its = relative(answers.components[name].tolist(), std)
                found = [a + w * b for a, w, b in zip(found, weights.tolist(), its, strict=True)]
            centre, divisor = mean(found, counts), 1e-4 + spread(found, counts, std)
            found = [(value - centre) / divisor for value in found]
    if config.advantage_std_of == "batch":
        return [value / (1e-4 + spread(rewards, counts, std)) for value in found]
    if config.advantage_std_of == "advantages":
        centre, divisor = mean(found, counts), 1e-4 + spread(found, counts, std)
        return [(value - centre) / divisor for value in found]
    return found


EIGHTHS = st.integers(0, 16).map(lambda n: n / 8)
ROWS = st.lists(st.tuples(EIGHTHS, st.integers(0, 3), st.integers(1, 9), EIGHTHS, EIGHTHS), min_size=1, max_size=18)


def of_rows(rows: list[tuple[float, int, int, float, float]]) -> ScoredAnswers:
    """Ragged groups in any order, some of them empty, with two components."""
    rewards, group, tokens, right, style = (list(column) for column in zip(*rows, strict=True))
    named = {"right": right, "style": style}
    weights = {"right": [1.0] * len(rows), "style": [0.5] * len(rows)}
    return table(rewards, group, tokens, named, weights, groups=4)


@pytest.mark.parametrize("name", RECIPES)
@examples(10)
@given(rows=ROWS)
def test_equals_the_papers_formula_in_float64(name: str, rows: list[Any]) -> None:
    answers = of_rows(rows)
    found = estimate(answers, recipe(name))
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(by_hand(answers, recipe(name)), rel=2e-4, abs=2e-4)


@pytest.mark.parametrize("name", SHIFTED)
@examples(6)
@given(rows=ROWS, shift=st.integers(-50, 50))
def test_a_constant_added_to_all_rewards_changes_nothing(name: str, rows: list[Any], shift: int) -> None:
    moved = [(reward + shift, *rest) for reward, *rest in rows]
    before, after = estimate(of_rows(rows), recipe(name)), estimate(of_rows(moved), recipe(name))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OWN_GROUP)
@examples(6)
@given(rows=ROWS)
def test_other_groups_do_not_matter_to_estimators_that_do_not_read_the_batch(name: str, rows: list[Any]) -> None:
    together = estimate(of_rows(rows), recipe(name))
    for its in range(4):
        own = [index for index, row in enumerate(rows) if row[1] == its]
        alone = estimate(of_rows([rows[index] for index in own]), recipe(name)) if own else torch.zeros(0)
        assert torch.equal(alone, together[own])


@pytest.mark.parametrize("name", [name for name in RECIPES if "whitened" not in name and "tokens" not in name])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_equal_rewards_of_a_group_give_exactly_zero(name: str, reward: float) -> None:
    rewards = [reward] * 3 + [1, 0, 0, 0]
    named = {"right": rewards, "style": rewards[::-1]}
    weights = {"right": [1.0] * 7, "style": [0.0] * 7}
    answers = table(rewards, [0] * 3 + [1] * 4, None, named, weights)
    found = estimate(answers, recipe(name))
    if not name.startswith("batch"):
        assert found[:3].tolist() == [0.0] * 3
    assert found[3:].any()


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_without_answers_has_no_advantages(name: str) -> None:
    assert estimate(table([], [], groups=2), recipe(name)).shape == (0,)


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(ValueError, match=r"grpo\.baseline maxrl .* a reward is -1"):
        estimate(table([1, -1], [0, 0]), recipe("maxrl"))


def test_components_of_another_environment_do_not_count() -> None:
    """The second group is of an environment without `style`."""
    named = {"right": [1.0, 0.0, 1.0, 0.0], "style": [0.0, 1.0, math.nan, math.nan]}
    weights = {"right": [1.0] * 4, "style": [2.0, 2.0, 0.0, 0.0]}
    found = estimate(table([0.0] * 4, [0, 0, 1, 1], None, named, weights), recipe("per reward"))
    assert found[0] == -found[1] < 0 < found[2] == -found[3]
    torch.testing.assert_close(found[1], found[2])  # -1 + 2 = 1


# Gradients of the objectives, over all outcomes of a group


def expected_gradient(name: str, rewards: list[float], logits: Tensor, size: int) -> Tensor:
    """Mean over all groups of answers of (1 / n) sum of A_i * gradient of log p_i, where answer o has `rewards[o]`."""
    logprobs = torch.log_softmax(logits, 0)
    total = torch.zeros(())
    for outcomes in product(range(len(rewards)), repeat=size):
        chosen = logprobs[list(outcomes)]
        advantages = estimate(table([rewards[o] for o in outcomes], [0] * size), recipe(name)).double()
        total = total + chosen.sum().exp().detach() * (advantages * chosen).mean()
    (gradient,) = torch.autograd.grad(total, logits)
    return gradient


def gradient_of(objective: Tensor, logits: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(objective, logits)
    return gradient


@pytest.fixture
def logits() -> Tensor:
    return torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64, requires_grad=True)


def test_leave_one_out_has_the_gradient_of_the_mean_reward(logits: Tensor) -> None:
    rewards = [1.0, 0.25, 0.0]
    objective = (logits.softmax(0) * torch.tensor(rewards)).sum()
    torch.testing.assert_close(
        expected_gradient("leave one out", rewards, logits, 3), gradient_of(objective, logits), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_maxrl_has_the_gradient_of_the_sum_of_pass_at_k_over_k(size: int, logits: Tensor) -> None:
    rewards = [1.0, 0.0, 0.0]
    right = logits.softmax(0)[0]
    objective = torch.stack([(1 - (1 - right) ** k) / k for k in range(1, size)]).sum()
    torch.testing.assert_close(
        expected_gradient("maxrl", rewards, logits, size), gradient_of(objective, logits), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0], [1.0, 0.25, 0.0]])
def test_pass_at_k_has_the_gradient_of_the_expected_best_reward(rewards: list[float], logits: Tensor) -> None:
    size, k = 4, 3
    logprobs = torch.log_softmax(logits, 0)
    best = torch.stack(
        [
            max(rewards[o] for o in outcomes) * logprobs[list(outcomes)].sum().exp()
            for outcomes in product(range(3), repeat=k)
        ]
    ).sum()
    scale = (1 - k / size) / k
    torch.testing.assert_close(
        expected_gradient("pass at 3", rewards, logits, size), scale * gradient_of(best, logits), rtol=1e-5, atol=1e-7
    )


@given(st.integers(2, 9), st.integers(0, 9), st.integers(2, 9))
def test_pass_at_k_with_rewards_0_and_1_has_the_analytic_advantages(answers: int, wrong: int, k: int) -> None:
    """Pass@k Training (arXiv 2508.10751) in closed form."""
    wrong, k = min(wrong, answers), min(k, answers)
    config = GrpoConfig(baseline="pass_at_k", pass_k=k)
    found = estimate(table([0.0] * wrong + [1.0] * (answers - wrong), [0] * answers), config)
    reward = 1 - math.comb(wrong, k) / math.comb(answers, k)
    sigma = math.sqrt(reward * (1 - reward))
    if sigma == 0:
        assert not found.any() or wrong < k  # every set has a right answer: all sets earn the same
        expected = [0.0] * answers
    else:
        of_wrong = 1 - reward - (math.comb(wrong - 1, k - 1) / math.comb(answers - 1, k - 1) if wrong else 0)
        expected = [of_wrong / (sigma + 1e-4)] * wrong + [(1 - reward) / (sigma + 1e-4)] * (answers - wrong)
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


# The same numbers in peers

RIGHT = [1.0, 0.0, 0.0, 0.0, 0.5, 1.0, 0.25, 1.0, 0.0, 0.0, 0.0, 0.0]
STYLE = [0.5, 0.5, 0.0, 0.0, 0.5, 0.0, 0.0, 0.5, 0.5, 0.0, 0.5, 0.0]
TOKENS = [3, 5, 2, 7, 4, 1, 6, 2, 8, 3, 5, 4]
GROUP = [0] * 4 + [1] * 4 + [2] * 4

VERL = {
    # verl 0.9.1, verl/trainer/ppo/core_algos.py: each answer's advantage in float64, of RIGHT (and STYLE with weight
    # 0.5), with TOKENS trained tokens. verl adds 1e-6 to a group's deviation and 1e-8 to the batch's variance.
    "compute_grpo_outcome_advantage": (
        "group sample",
        [1.499997, -0.499999, -0.499999, -0.499999, -0.4999987, 0.8333311, -1.1666636, 0.8333311, 0, 0, 0, 0],
    ),
    "compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False": (
        "group none",
        [0.75, -0.25, -0.25, -0.25, -0.1875, 0.3125, -0.4375, 0.3125, 0, 0, 0, 0],
    ),
    "compute_rloo_outcome_advantage": (
        "leave one out",
        [1.0, -0.3333333, -0.3333333, -0.3333333, -0.25, 0.4166667, -0.5833333, 0.4166667, 0, 0, 0, 0],
    ),
    "compute_reinforce_plus_plus_outcome_advantage": (
        "batch tokens",
        [2.402456, *[-0.5635391] * 3, 0.9194585, 2.402456, 0.1779597, 2.402456, *[-0.5635391] * 4],
    ),
    "compute_reinforce_plus_plus_baseline_outcome_advantage": (
        "group whitened",
        [2.9301736, *[-0.6269415] * 3, -0.4046218, 1.3739357, -1.2939006, 1.3739357, *[0.2623372] * 4],
    ),
    "compute_gdpo_outcome_advantage": (
        "per reward sample tokens",
        [
            *(2.2861068, 0.0862043, -0.86638, -0.86638, 0.0862047, 0.600221),
            *(-1.59968, 1.5528053, 0.6361799, -0.3164044, 0.6361799, -0.3164044),
        ],
    ),
}


def of_peers() -> ScoredAnswers:
    return table(RIGHT, GROUP, TOKENS, {"right": RIGHT, "style": STYLE}, {"right": [1.0] * 12, "style": [0.5] * 12})


@pytest.mark.parametrize("function", VERL)
def test_equals_verl_up_to_the_added_constants(function: str) -> None:
    name, expected = VERL[function]
    keys = {"baseline": "per_reward", "advantage_std": "sample", "batch_over": "tokens"}
    config = GrpoConfig(**keys) if name not in RECIPES else recipe(name)  # type: ignore[arg-type]
    assert estimate(of_peers(), config).tolist() == pytest.approx(expected, rel=1e-3, abs=2e-4)
