"""Scores of an evaluation from its answers. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron_rl.contract.evaluation_records import (
    GREEDY,
    SAMPLED,
    EvaluationResult,
    MeanScore,
    ProblemAnswers,
    ProblemKey,
    ScoredAnswer,
    SetResult,
)

RIGHT = 1.0  # accuracy of a right answer, see `environment.accuracy`

Z_95 = 1.959964  # standard normal quantile of a two-sided interval of 95 %

OF_ANSWERS: Mapping[str, Callable[[ScoredAnswer], float]] = {
    "mean_reward": lambda answer: answer.reward,
    "tokens": lambda answer: float(answer.tokens),
    "cut_off": lambda answer: float(answer.finish_reason == "length"),
}
"""Quantities that are averaged over each problem's answers, and then over problems."""


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


def majority(answers: Sequence[ScoredAnswer]) -> float:
    """Return the share of right answers among the most frequent ones (several if tied); 0 if no answer is comparable.

    Equivalent answers may be scored differently, for example if one has trailing text: such a vote is right if any of
    its answers is.
    """
    votes: defaultdict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        if answer.vote is not None:
            votes[answer.vote].append(is_right(answer))
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    first = [any(given) for given in votes.values() if len(given) == most]
    return sum(first) / len(first)


def powers_up_to(k: int) -> list[int]:
    """Return the values of k for which pass@k is reported: 1, 2, 4, ... and k itself."""
    return sorted({2**power for power in range(k.bit_length()) if 2**power <= k} | {k})


def average(problems: Iterable[Sequence[ScoredAnswer]]) -> MeanScore | None:
    """Return avg@k: the mean over problems of the share of right answers."""
    return mean_over_problems([_right(each) / len(each) for each in problems if each])


def is_right(answer: ScoredAnswer) -> bool:
    return (answer.reward if answer.accuracy is None else answer.accuracy) == RIGHT


def _right(answers: Sequence[ScoredAnswer]) -> int:
    return sum(map(is_right, answers))


def result(
    settings: Mapping[str, Any], sizes: Mapping[str, int], known: Mapping[ProblemKey, ProblemAnswers], answers: str
) -> EvaluationResult:
    """Return the scores of all sets.

    Args:
        sizes: number of problems of each set.
        known: answers to all problems, sampled, and greedy if requested.
        answers: path of the file with the answers.
    """
    sets = {}
    for name, size in sizes.items():
        sampled = [known[name, SAMPLED, problem] for problem in range(size)]
        greedy = [known[name, GREEDY, problem] for problem in range(size) if (name, GREEDY, problem) in known]
        sets[name] = set_result(sampled, greedy, settings["k"], settings["compares_answers"])
    return EvaluationResult(dict(settings), sets, answers)


def set_result(
    sampled: Sequence[ProblemAnswers], greedy: Sequence[ProblemAnswers], k: int, compares_answers: bool
) -> SetResult:
    scores = {"greedy": average(each.answers for each in greedy)}
    counts = powers_up_to(k)
    problems = [problem_scores(each.answers, counts, k, compares_answers) for each in sampled]
    scores |= mean_scores(problems, score_names(counts, k))
    return SetResult(
        problems=len(sampled),
        answers=sum(len(each.answers) for each in sampled),
        failures=_failures(sampled),
        greedy_failures=_failures(greedy),
        scores={name: score for name, score in scores.items() if score},
    )


def problem_scores(
    answers: Sequence[ScoredAnswer], counts: Sequence[int], k: int, compares_answers: bool
) -> dict[str, float]:
    """Return the scores of the sampled answers to one problem, those that can be computed.

    Args:
        counts: values of k for which pass@k is wanted.
        k: number of answers that were asked for, more than there are if some were lost.
    """
    if not answers:
        return {}
    found = {
        f"pass@{count}": pass_at_k(len(answers), _right(answers), count) for count in counts if count <= len(answers)
    }
    found[f"avg@{k}"] = _right(answers) / len(answers)
    if compares_answers:
        found[f"maj@{k}"] = majority(answers)
    return found | {name: sum(map(of, answers)) / len(answers) for name, of in OF_ANSWERS.items()}


def score_names(counts: Sequence[int], k: int) -> list[str]:
    """Return all names that `problem_scores` may give, in their order."""
    return [*(f"pass@{count}" for count in counts), f"avg@{k}", f"maj@{k}", *OF_ANSWERS]


def mean_scores(problems: Sequence[Mapping[str, float]], names: Iterable[str]) -> dict[str, MeanScore | None]:
    """Return the mean of each score over the problems that have it, None where none has."""
    return {name: mean_over_problems([scores[name] for scores in problems if name in scores]) for name in names}


def interval(score: MeanScore) -> tuple[float, float]:
    """Return the bounds of the 95 % interval of a mean of shares over problems.

    Wilson's interval for the number of single answers that would have the score's standard error, p (1 - p) / error^2
    (the effective sample size of Franco et al. 2019, doi 10.1093/jssam/smy019). So it lies within 0 and 1, and does not
    vanish where all problems are alike, as the mean plus or minus two standard errors would.
    """
    p, error = score.value, score.standard_error
    spread = p * (1 - p)
    count = max(float(score.problems), spread / error**2 if error and spread > 0 else 0.0)
    shrink = 1 + Z_95**2 / count
    centre = (p + Z_95**2 / (2 * count)) / shrink
    half = Z_95 * math.sqrt(spread / count + (Z_95 / (2 * count)) ** 2) / shrink
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))


def _failures(problems: Sequence[ProblemAnswers]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in problems:
        total.update(each.failures)
    return dict(sorted(total.items()))
