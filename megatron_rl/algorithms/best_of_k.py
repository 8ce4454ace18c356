"""Advantages for the best of k answers: pass@k as the objective, instead of the mean reward."""

from __future__ import annotations

from math import comb, sqrt

import torch
from torch import Tensor

from megatron_rl.algorithms.advantages import STD_EPSILON
from megatron_rl.algorithms.signal import has_signal


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
