"""Which problems are trained on: those whose prompt leaves room for an answer. Pure.

Known at the start and by the recipe alone, so an ordinal of the prompt stream is the same problem in every attempt. A
problem that is left out costs no step an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.trajectories import Problem

MOST_TOKENISED = 20_000
"""Prompts of a set that are tokenised at the start, which takes some seconds. Where more of them may be too long, it
comes out when their turn comes, and they are dropped then."""

SPARE = 8
"""Tokens that a text may have more than bytes: some tokenizers begin with a blank of their own."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """A set, and what was left out of it."""

    training_set: TrainingSet
    """Of those that fit, in their order."""
    left_out: int
    problems: int
    """With those left out."""


def fitting(whole: TrainingSet, longest: int, encode: Callable[[str], Sequence[int]]) -> Fitting:
    """Without the problems whose prompt has more than `longest` tokens.

    Few are tokenised: no text has more tokens than bytes (of those that a tokenizer first makes longer, where it does,
    some are found when their turn comes).
    """
    problems = whole.problems
    doubtful = [place for place, problem in enumerate(problems) if not _surely_fits(problem, longest)]
    too_long = {place for place in doubtful[:MOST_TOKENISED] if len(encode(problems[place].prompt)) > longest}
    if not too_long:
        return Fitting(whole, 0, len(problems))
    kept = [problem for place, problem in enumerate(problems) if place not in too_long]
    return Fitting(replace(whole, problems=kept), len(too_long), len(problems))


def _surely_fits(problem: Problem, longest: int) -> bool:
    text = problem.prompt
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return size + SPARE <= longest
