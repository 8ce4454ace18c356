"""Advantages: the reward of each answer relative to those of other answers. `credit.py` chooses among them."""

from __future__ import annotations

from math import comb, sqrt

import torch
from torch import Tensor

from megatron_rl.algorithms.answers import ScoredAnswers
from megatron_rl.algorithms.rewards import has_signal
from megatron_rl.recipe.grpo import AdvantageStd

STD_EPSILON = 1e-4


def group_advantages(rewards: Tensor, group: Tensor, num_groups: int, *, std: AdvantageStd) -> Tensor:
    """Return the advantage of each answer within its group.

    (reward - mean) / (1e-4 + std) of GRPO (arXiv 2402.03300), or with `std: none` reward - mean of Dr. GRPO (arXiv
    2503.20783). In a group without signal (see `has_signal`), such as a single answer, it is exactly 0.

    Args:
        rewards: [answers], any floating type.
        group: [answers] int64, the group of each answer in 0..num_groups-1; groups may differ in size.
        std: divisor: of the group as the population, as a sample (n - 1), or none.

    Returns:
        [answers] fp32, without gradient.

    Raises:
        RuntimeError: a group index is not below `num_groups`.
    """
    return _of_groups(rewards, group, num_groups, std).float()


def leave_one_out_advantages(rewards: Tensor, group: Tensor, num_groups: int, *, std: AdvantageStd) -> Tensor:
    """Return the reward of each answer less the mean reward of the *other* answers to its prompt (RLOO, arXiv
    2402.14740; Kool et al. 2019, https://openreview.net/forum?id=r1lgTGL5DE).

    This is n / (n - 1) times the advantage of `group_advantages` with `std: none`. As the baseline of an answer does
    not depend on the answer, the gradient is unbiased. A divisor is, as there, that of the whole group.

    Args: as for `group_advantages`.

    Returns:
        [answers] fp32, without gradient; 0 for a single answer and in groups without signal.
    """
    counts = _counts(rewards, group, num_groups)
    factor = counts / (counts - 1).clamp(min=1)
    return (_of_groups(rewards, group, num_groups, std) * factor[group]).float()


def maxrl_advantages(rewards: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return (reward - mean) / mean within the group (MaxRL, arXiv 2602.02710).

    With rewards of 0 and 1 and n answers, the expected gradient is that of the sum over k = 1..n-1 of pass@k / k, which
    approaches the log-likelihood of a right answer as the group grows. A group without right answers has advantages of
    0.

    Args: as for `group_advantages`; no reward is negative.

    Returns:
        [answers] fp32, without gradient.

    Raises:
        ValueError: a reward is negative, so that the mean is not a pass rate.
    """
    if len(rewards) and float(rewards.min()) < 0:
        raise ValueError(
            f"grpo.baseline maxrl divides by the mean reward of a group, and a reward is {float(rewards.min()):g}: "
            "rewards must be 0 or more, best 0 and 1"
        )
    deviation = _of_groups(rewards, group, num_groups, "none")
    means = _mean(rewards.detach().double(), group, num_groups)
    # A group with signal has a positive mean. In the others the deviation is 0.
    return (deviation / torch.where(means > 0, means, 1.0)[group]).float()


def batch_advantages(rewards: Tensor, units: Tensor, *, std: AdvantageStd) -> Tensor:
    """Return the advantage of each answer within the whole batch (REINFORCE++, arXiv 2501.03262, equation 5).

    (reward - mean) / (1e-4 + std), or reward - mean, with the mean and std of all units; 0 if all rewards are equal up
    to rounding (see `has_signal`).

    Args:
        rewards: [answers], any floating type: all answers of the batch.
        units: [answers] int64, how often each answer counts: 1, or its number of tokens.

    Returns:
        [answers] fp32, without gradient.
    """
    rewards = rewards.detach()
    whole = torch.zeros_like(units)
    if not len(rewards) or not has_signal(rewards, whole, 1).item():
        return torch.zeros_like(rewards, dtype=torch.float32)
    deviation = rewards.double() - _weighted_mean(rewards, units)
    return (deviation / (1.0 if std == "none" else STD_EPSILON + _weighted_std(rewards, units, std))).float()


def over_batch_std(advantages: Tensor, rewards: Tensor, units: Tensor, *, std: AdvantageStd) -> Tensor:
    """Return the advantages divided by 1e-4 + the standard deviation of the rewards of the whole batch (Lite PPO, arXiv
    2508.08221): within a group the advantages keep their proportions, and groups of little spread weigh little.

    Args: as for `batch_advantages`; advantages: [answers].

    Returns:
        [answers] fp32
    """
    return (advantages.double() / (STD_EPSILON + _weighted_std(rewards, units, std))).float()


def per_reward_advantages(answers: ScoredAnswers, units: Tensor, *, std: AdvantageStd) -> Tensor:
    """Return the weighted sum of the advantages by each component of the reward, normalised over the batch (GDPO,
    arXiv 2601.05242).

        A = whiten(sum over k of weight_k A_k)    A_k: `group_advantages` of component k

    Sums of components first, as `group` does, merge combinations of equal sum: with two components of 0 and 1, (1, 0)
    and (0, 1) would earn the same. The mean over answers is 0 already and only subtracted over tokens.

    Args:
        answers: of the whole step, with `component_weights`.
        units: [answers] int64, as for `batch_advantages`.
        std: population or sample, for both normalisations.

    Returns:
        [answers] fp32, without gradient; exactly 0 in groups without signal if units are answers.
    """
    total = torch.zeros_like(answers.rewards, dtype=torch.float64)
    for name, weights in answers.component_weights.items():
        values = torch.where(weights != 0, answers.components[name].nan_to_num(), 0.0)
        total += weights * _of_groups(values, answers.group, answers.num_groups, std)
    if not bool(total.any()):
        return total.float()
    by_answer = bool((units == 1).all())
    centred = total if by_answer else total - _weighted_mean(total, units)
    return (centred / (STD_EPSILON + _weighted_std(total, units, std))).float()


def _of_groups(rewards: Tensor, group: Tensor, num_groups: int, std: AdvantageStd) -> Tensor:
    """Return what `group_advantages` returns, in fp64."""
    deviation = _deviation(rewards, group, num_groups) * has_signal(rewards, group, num_groups)[group]
    if std == "none":
        return deviation
    return deviation / (STD_EPSILON + _group_std(deviation, group, num_groups, std))[group]


def _deviation(rewards: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return each reward minus its group's mean, [answers] fp64: fp32 may not hold the difference of large rewards."""
    rewards = rewards.detach().double()
    lowest = rewards.new_zeros(num_groups).scatter_reduce(0, group, rewards, "amin", include_self=False)
    # Relative to the lowest reward: n equal rewards need not sum to exactly n times one of them, but n zeros sum to 0.
    above_lowest = rewards - lowest[group]
    return above_lowest - _mean(above_lowest, group, num_groups)[group]


def _group_std(deviation: Tensor, group: Tensor, num_groups: int, std: AdvantageStd) -> Tensor:
    variance = _mean(deviation.square(), group, num_groups)
    if std == "sample":
        counts = _counts(deviation, group, num_groups)
        variance = variance * (counts / (counts - 1).clamp(min=1))
    return variance.sqrt()


def _counts(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    ones = torch.ones(len(values), dtype=torch.float64, device=values.device)
    return ones.new_zeros(num_groups).index_add(0, group, ones)


def _mean(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return the mean of each group's values, [groups]; 0 for an empty group."""
    sums = values.new_zeros(num_groups).index_add(0, group, values)
    return sums / _counts(values, group, num_groups).clamp(min=1)


def _weighted_mean(values: Tensor, units: Tensor) -> Tensor:
    return (values.double() * units).sum() / units.sum().clamp(min=1)


def _weighted_std(values: Tensor, units: Tensor, std: AdvantageStd) -> Tensor:
    squares = ((values.double() - _weighted_mean(values, units)).square() * units).sum()
    return (squares / (units.sum() - int(std == "sample")).clamp(min=1)).sqrt()


def best_of_k_advantages(rewards: Tensor, group: Tensor, num_groups: int, *, k: int, std: bool) -> Tensor:
    """Return the advantage of each answer if a prompt earns the best reward among k of its answers.

    A set of k of the group's n answers earns its largest reward. The advantage of an answer is the mean over all sets
    that contain it less the mean M over all sets, and with `std` this is divided by 1e-4 + the standard deviation over
    all sets. The means are over all C(n, k) sets exactly, not over drawn ones.

    With rewards of 0 and 1 and `std` this is the analytic form of Pass@k Training (arXiv 2508.10751): with w wrong
    answers, M = 1 - C(w, k) / C(n, k), a right answer has 1 - M, a wrong one 1 - M - C(w - 1, k - 1) / C(n - 1, k - 1),
    both divided by sqrt(M (1 - M)). Without `std` the expected gradient is a constant times that of the expected best
    reward, as in PKPO (arXiv 2505.15201).

    Args:
        rewards: [answers], any floating type.
        group: [answers] int64, the group of each answer in 0..num_groups-1; groups may differ in size.
        k: answers in a set, at least 1. A group of fewer answers is one set, so its advantages are 0.
        std: whether to divide.

    Returns:
        [answers] fp32, without gradient; 0 in groups without signal.
    """
    found = torch.zeros(len(rewards), dtype=torch.float64)
    for number in has_signal(rewards, group, num_groups).nonzero().flatten().tolist():
        members = (group == number).nonzero().flatten()
        found[members] = _of_group(rewards[members].detach().double(), k, std=std)
    return found.float()


def _of_group(rewards: Tensor, k: int, *, std: bool) -> Tensor:
    n = len(rewards)
    k = min(k, n)
    order = rewards.argsort()
    # Relative to the lowest reward, which cancels in every difference.
    ascending = (rewards[order] - rewards[order[0]]).tolist()
    # Rank j (from 0) is the best of a set with probability C(j, k - 1) / C(n, k).
    best = [comb(j, k - 1) / comb(n, k) for j in range(n)]
    mean = sum(p * r for p, r in zip(best, ascending, strict=True))
    of_rank = []
    above = 0.0  # sum over higher ranks j of their reward * P(j is the best | the answer is in the set)
    for j in reversed(range(n)):
        own = comb(j, k - 1) / comb(n - 1, k - 1)
        of_rank.append(own * ascending[j] + above - mean)
        above += ascending[j] * (comb(j - 1, k - 2) / comb(n - 1, k - 1) if k > 1 and j > 0 else 0.0)
    advantages = torch.empty(n, dtype=torch.float64)
    advantages[order] = torch.tensor(of_rank[::-1], dtype=torch.float64)
    if std:
        variance = sum(p * (r - mean) ** 2 for p, r in zip(best, ascending, strict=True))
        advantages /= STD_EPSILON + sqrt(variance)
    return advantages
