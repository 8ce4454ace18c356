"""What an evaluation leaves behind: its answers as they come, and its result."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_rl.contract.shapes import record

SAMPLED = "sampled"  # of ProblemAnswers.mode: k answers
GREEDY = "greedy"  # one at temperature 0


@record(event="evaluation")
class EvaluationSettings(NamedTuple):
    """First line of NAME.answers.jsonl: what the lines below are answers under, and whatever else their scores depend
    on. Written and read by the evaluation, which refuses to go on under others."""

    settings: dict[str, Any]


@record(version=None)
class ScoredAnswer(NamedTuple):
    """One answer. In ProblemAnswers."""

    reward: float
    tokens: int
    finish_reason: str  # stop or length
    text: str
    vote: str | None = None  # the same of answers that say the same; None: it says nothing that can be compared


@record(event="answers")
class ProblemAnswers(NamedTuple):
    """NAME.answers.jsonl, a line for each problem that has been answered. Written and read by the evaluation."""

    set: str
    mode: str
    problem: int  # place in the set, from 0
    answers: list[ScoredAnswer]
    failures: dict[str, int]  # answers lost, by reason


@record(version=None)
class Score(NamedTuple):
    """A mean over problems. In SetResult."""

    value: float
    standard_error: float | None = None  # None: of one problem
    problems: int = 0  # that it is over; those with too few answers are left out


@record(version=None)
class SetResult(NamedTuple):
    """The scores of one set of problems. In EvaluationResult."""

    problems: int
    answers: int  # sampled and scored; greedy ones not among them
    failures: dict[str, int]  # sampled answers lost, by reason
    greedy_failures: dict[str, int]
    scores: dict[str, Score]  # greedy, pass@1, ..., avg@K, maj@K, mean_reward, tokens, cut_off; those that can be told


@record()
class EvaluationResult(NamedTuple):
    """NAME.json: what a finished evaluation found. Written by it, read by `mrl evaluate` and by people."""

    settings: dict[str, Any]  # EvaluationSettings.settings
    sets: dict[str, SetResult]
    answers: str  # path of the file of answers
