"""Scores of k answers to each problem: pass@k, avg@k, maj@k, with their standard errors. Pure, on plain numbers.

A problem may have fewer answers than requested: answers whose scoring failed are lost and not counted. A problem with
too few answers for a score is excluded from that score, and the number of included problems is reported beside it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_rl.contract.evaluation_records import MeanScore


@dataclass(frozen=True, slots=True)
class Judged:
    right: bool
    vote: str | None = None
    """Key that is equal for equivalent answers; None if the response has no comparable answer."""


def mean_over_problems(values: Sequence[float]) -> MeanScore | None:
    """Return the mean over problems with its standard error; None without problems.

    The standard error is that of an estimate for similar problems: the standard deviation of the problems' values,
    divided by the square root of their number.
    """
    count = len(values)
    if not count:
        return None
    mean = math.fsum(values) / count
    if count == 1:
        return MeanScore(mean, None, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return MeanScore(mean, math.sqrt(variance / count), count)


def pass_at_k(answers: int, right: int, k: int) -> float:
    """Return the probability that at least one of k answers, drawn without replacement from the given ones, is right.

    The unbiased estimate 1 - C(answers - right, k) / C(answers, k) of Chen et al. 2021 (arXiv 2107.03374), computed as
    a product because the binomials overflow.

    Raises ValueError unless 1 <= k <= answers and 0 <= right <= answers.
    """
    if not (1 <= k <= answers and 0 <= right <= answers):
        raise ValueError(f"pass@{k} of {answers} answers, {right} of them right, does not exist")
    if answers - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(answers - right + 1, answers + 1))


def majority(answers: Sequence[Judged]) -> float:
    """Return the share of right answers among the most frequent ones (several if tied); 0 if no answer is comparable.

    Equivalent answers may be scored differently, for example if one has trailing text: such a vote is right if any of
    its answers is.
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
    """Return the values of k for which pass@k is reported: 1, 2, 4, ... and k itself."""
    return sorted({2**power for power in range(k.bit_length()) if 2**power <= k} | {k})


def pass_at(problems: Iterable[Sequence[Judged]], k: int) -> MeanScore | None:
    """Return pass@k over the problems that have at least k answers."""
    enough = [answers for answers in problems if len(answers) >= k]
    return mean_over_problems([pass_at_k(len(each), sum(answer.right for answer in each), k) for each in enough])


def average(problems: Iterable[Sequence[Judged]]) -> MeanScore | None:
    """Return avg@k: the mean over problems of the share of right answers."""
    return mean_over_problems([sum(answer.right for answer in each) / len(each) for each in problems if each])


def majority_over(problems: Iterable[Sequence[Judged]]) -> MeanScore | None:
    """Return maj@k over the problems that have answers."""
    return mean_over_problems([majority(each) for each in problems if each])
