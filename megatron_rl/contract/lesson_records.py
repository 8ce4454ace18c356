"""The lesson of a run, as its ranks found it at the start: lesson.json.

The prompts and answers themselves are in the record of rollouts.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_rl.contract.shapes import record


@record(version=None)
class RightAnswer(NamedTuple):
    """The right answer to a problem, by its data, and what the run's reward gives for it."""

    prompt: str  # its first SHOWN characters
    answer: str  # its first SHOWN characters
    reward: float | None  # None: the answer was lost
    why: str = ""  # reason of a lost answer


@record(version=None)
class PromptCounts(NamedTuple):
    """Counts over the first prompts of a run, or over its first rows of data."""

    prompts: int
    distinct: int  # different texts among them
    empty: int  # prompts that say nothing beyond what all of them share; 0 if all are equal
    longest: int  # characters of the longest one, less those that all share
    at_longest: int  # different prompts of that length
    lengths: int  # different lengths
    at_another: int  # different prompts of the commonest other length


@record()
class LessonRecord(NamedTuple):
    """Written once, by rank 0 of the first attempt; kept when the run resumes. Absent in runs of an older mrl."""

    prompts: PromptCounts
    right: list[RightAnswer] = []  # of the first problems; empty if the data has no right answers


SHOWN = 400
