"""Scores of an evaluation from its answers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl.agent.evaluation_scores import (
    Judged,
    average,
    majority_over,
    mean_over_problems,
    pass_at,
    powers_up_to,
)
from megatron_rl.contract.evaluation_records import (
    GREEDY,
    SAMPLED,
    EvaluationResult,
    MeanScore,
    ProblemAnswers,
    ScoredAnswer,
    SetResult,
)
from megatron_rl.evaluate.answer_file import ProblemKey

RIGHT = 1.0
"""Reward of a correct answer, as in a run's greedy accuracy."""

OF_ANSWERS: Mapping[str, Callable[[ScoredAnswer], float]] = {
    "mean_reward": lambda answer: answer.reward,
    "tokens": lambda answer: float(answer.tokens),
    "cut_off": lambda answer: float(answer.finish_reason == "length"),
}
"""Quantities that are averaged over each problem's answers, and then over problems."""


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
    judged = [[_judged(answer) for answer in each.answers] for each in sampled]
    scores: dict[str, MeanScore | None] = {
        "greedy": average([[_judged(one) for one in each.answers] for each in greedy])
    }
    scores |= {f"pass@{count}": pass_at(judged, count) for count in powers_up_to(k)}
    scores[f"avg@{k}"] = average(judged)
    if compares_answers:
        scores[f"maj@{k}"] = majority_over(judged)
    for name, of in OF_ANSWERS.items():
        values = [[of(one) for one in each.answers] for each in sampled]
        scores[name] = mean_over_problems([sum(each) / len(each) for each in values if each])
    return SetResult(
        problems=len(sampled),
        answers=sum(len(each.answers) for each in sampled),
        failures=_failures(sampled),
        greedy_failures=_failures(greedy),
        scores={name: score for name, score in scores.items() if score},
    )


def _judged(answer: ScoredAnswer) -> Judged:
    return Judged(answer.reward == RIGHT, answer.vote)


def _failures(problems: Sequence[ProblemAnswers]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in problems:
        total.update(each.failures)
    return dict(sorted(total.items()))
