"""Records of an evaluation: its answers as they arrive, and its result."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_rl.contract.shapes import record

SAMPLED = "sampled"  # mode of ProblemAnswers: k sampled answers
GREEDY = "greedy"  # mode of ProblemAnswers: one answer at temperature 0

ProblemKey = tuple[str, str, int]  # set, mode and number of a problem


@record(event="evaluation")
class EvaluationSettings(NamedTuple):
    """First line of NAME.answers.jsonl: the settings of the answers below, and everything else that their scores depend
    on. Written and read by the evaluation, which refuses to continue with different settings."""

    settings: dict[str, Any]


@record(version=None)
class ScoredAnswer(NamedTuple):
    reward: float
    tokens: int
    finish_reason: str  # stop or length
    text: str
    vote: str | None = None  # equal for equivalent answers; None: no comparable answer
    accuracy: float | None = None  # how right the answer is (`environment.accuracy`), 1: right; None: as its reward


@record(event="answers")
class ProblemAnswers(NamedTuple):
    """NAME.answers.jsonl, one line per answered problem. Written and read by the evaluation."""

    set: str
    mode: str
    problem: int  # index in the set, from 0
    answers: list[ScoredAnswer]
    failures: dict[str, int]  # answers lost, by reason


@record(event="pass_rate")
class PassRate(NamedTuple):
    """A line of a file of pass rates, such as NAME.pass_rates.jsonl: a training problem and the share of right answers.
    Written by `mrl evaluate --keep` and `mrl data filter`, read by the latter and by runs (`curriculum.start`)."""

    environment: str  # id; empty if there is only one environment
    prompt: str  # `agent.problem_digest.prompt_digest`
    rate: float
    answers: int  # scored ones, at least one
    text: str = ""  # beginning of the prompt, for people


@record(version=None)
class MeanScore(NamedTuple):
    """A mean over problems, in SetResult."""

    value: float
    standard_error: float | None = None  # None: a single problem
    problems: int = 0  # number of problems; those with too few answers are excluded


@record(version=None)
class SetResult(NamedTuple):
    problems: int
    answers: int  # sampled and scored, without greedy ones
    failures: dict[str, int]  # sampled answers lost, by reason
    greedy_failures: dict[str, int]
    scores: dict[
        str, MeanScore
    ]  # greedy, pass@1, ..., avg@K, maj@K, mean_reward, tokens, cut_off; those that can be computed


@record()
class EvaluationResult(NamedTuple):
    """NAME.json: result of a finished evaluation. Written by the evaluation, read by `mrl evaluate` and by people."""

    settings: dict[str, Any]  # EvaluationSettings.settings
    sets: dict[str, SetResult]
    answers: str  # path of the file of answers
    pass_rates: str | None = None  # path of the file of pass rates, with --keep
