"""Scores of k answers to each problem: pass@k, avg@k, maj@k, with their standard errors. Pure, on plain numbers.

A problem may have fewer answers than were asked for: one whose scoring failed is lost, and counts nowhere. A problem
with too few answers for a score is left out of that score, and the number of those that are in it is told beside it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over problems."""

    value: float
    standard_error: float | None
    """Of `value` as an estimate for problems like these: the spread of the problems' values, over the root of their
    number; None of one problem."""
    problems: int
    """How many it is over."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One answer that has been scored."""

    right: bool
    vote: str | None = None
    """Equal for answers that say the same; None: it has none that could be compared."""


def mean_over_problems(values: Sequence[float]) -> Mean | None:
    """None where there are none."""
    count = len(values)
    if not count:
        return None
    mean = math.fsum(values) / count
    if count == 1:
        return Mean(mean, None, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Mean(mean, math.sqrt(variance / count), count)


def pass_at_k(answers: int, right: int, k: int) -> float:
    """How likely it is that of k answers, drawn from these without putting back, at least one is right: the unbiased
    estimate 1 - C(answers - right, k) / C(answers, k) of Chen et al. 2021 (arXiv 2107.03374), as a product, since the
    binomials overflow.

    Raises ValueError unless 1 <= k <= answers and 0 <= right <= answers.
    """
    if not (1 <= k <= answers and 0 <= right <= answers):
        raise ValueError(f"pass@{k} of {answers} answers, {right} of them right, does not exist")
    if answers - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(answers - right + 1, answers + 1))


def majority(answers: Sequence[Judged]) -> float:
    """Share of the answers given most often, one or several tied ones, that are right; 0 where none can be compared.

    Answers that say the same may be scored differently (one goes on talking): such a vote is right if any of them is.
    """
    votes: defaultdict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        if answer.vote is not None:
            votes[answer.vote].append(answer.right)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    first = [any(given) for given in votes.values() if len(given) == most]
    return sum(first) / len(first)


def powers_up_to(k: int) -> list[int]:
    """The ks that pass@k is told for: 1, 2, 4, ... and k itself."""
    return sorted({2**power for power in range(k.bit_length()) if 2**power <= k} | {k})


def pass_at(problems: Iterable[Sequence[Judged]], k: int) -> Mean | None:
    """pass@k over the problems that have k answers."""
    enough = [answers for answers in problems if len(answers) >= k]
    return mean_over_problems([pass_at_k(len(each), sum(answer.right for answer in each), k) for each in enough])


def average(problems: Iterable[Sequence[Judged]]) -> Mean | None:
    """avg@k: the share of right answers of each problem that has any, on average."""
    return mean_over_problems([sum(answer.right for answer in each) / len(each) for each in problems if each])


def majority_over(problems: Iterable[Sequence[Judged]]) -> Mean | None:
    """maj@k over the problems that have answers."""
    return mean_over_problems([majority(each) for each in problems if each])
