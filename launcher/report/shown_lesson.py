"""Pure: the lesson on the page: prompts and answers of the first and the last recorded step, or the first rows of data,
with their tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from megatron_rl.contract.rollout_records import GroupLine, SequenceLine

MOST_ROWS = 4
"""Rows of the first recorded step; of several sets at least one each, as far as the step has them."""
MOST_TOKENS = 600
"""Tokens of a prompt, and of an answer; of longer ones their start and their end are shown."""
CONTROL = re.compile(r"<[^<>\s]{1,60}>|<\uff5c[^<>]{1,60}\uff5c>|\[/?[A-Z_]{2,}\]")


class Token(NamedTuple):
    text: str
    learned: bool
    control: bool


@dataclass(frozen=True, slots=True)
class Passage:
    start: Sequence[Token]
    end: Sequence[Token]
    left_out: int

    @property
    def size(self) -> int:
        return len(self.start) + self.left_out + len(self.end)


class LessonAnswer(NamedTuple):
    reward: float
    advantage: float
    ended: str
    passage: Passage


@dataclass(frozen=True, slots=True)
class TaughtProblem:
    step: int
    prompt: Passage
    right: str | None
    answers: Sequence[LessonAnswer]


class TaughtRow(NamedTuple):
    set: str  # id; empty if there is only one
    passage: Passage


@dataclass(frozen=True, slots=True)
class ShownLesson:
    problems: Sequence[TaughtProblem]
    rows: Sequence[TaughtRow]


def lesson_of(first: Sequence[GroupLine], last: Sequence[GroupLine]) -> ShownLesson | None:
    """Return the lesson of a run, from the groups with tokens of its first and its last recorded step, which may be the
    same; None if there are none."""
    if not first:
        return None
    if all(version < 0 for answer in first[0].answers for one in answer.sequences for version in one.versions):
        turns = [of_set for _, of_set in sorted(_with_turns(first), key=itemgetter(0))]
        sets = len({group.environment for group in first})
        shown = [(group, answer) for group in turns[: max(MOST_ROWS, sets)] for answer in group.answers[:1]]
        return ShownLesson([], [TaughtRow(group.environment, passage(one.sequences[0])) for group, one in shown])
    groups = [first[0], *(last[:1] if last and last[0].step > first[0].step else [])]
    return ShownLesson([_problem(group) for group in groups], [])


def _with_turns(groups: Sequence[GroupLine]) -> Iterator[tuple[int, GroupLine]]:
    """Yield each group with the number of earlier ones of its set."""
    seen: Counter[str] = Counter()
    for group in groups:
        yield seen[group.environment], group
        seen[group.environment] += 1


def _problem(group: GroupLine) -> TaughtProblem:
    best = max(range(len(group.rewards)), key=group.rewards.__getitem__)
    worst = min(range(len(group.rewards)), key=group.rewards.__getitem__)
    chosen = [best, worst] if group.rewards[worst] < group.rewards[best] else [best]
    sequence = group.answers[best].sequences[0]
    answers = [
        LessonAnswer(group.rewards[at], group.advantages[at], group.finish_reasons[at], passage(its, answer=True))
        for at, its in ((at, group.answers[at].sequences[-1]) for at in chosen)
    ]
    return TaughtProblem(group.step, passage(sequence, answer=False), group.right, answers)


def passage(sequence: SequenceLine, *, answer: bool | None = None) -> Passage:
    """Return the tokens of a sequence: all, those from the model's first turn on (`answer`), or those before it
    (False)."""
    border = sequence.turns[0][0] if sequence.turns else len(sequence.pieces)
    chosen = slice(None) if answer is None else slice(border, None) if answer else slice(border)
    pairs = zip(sequence.pieces[chosen], sequence.trained[chosen], strict=True)
    tokens = [Token(text.replace("\n", "↵\n"), learned, bool(CONTROL.fullmatch(text))) for text, learned in pairs]
    if len(tokens) <= MOST_TOKENS:
        return Passage(tokens, [], 0)
    half = MOST_TOKENS // 2
    return Passage(tokens[:half], tokens[-half:], len(tokens) - MOST_TOKENS)
