"""Selection of groups and answers from the record of a run's rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.rollout_records import STEPS_PER_FILE, GroupLine, read_rollouts


@dataclass(frozen=True, slots=True)
class Wanted:
    """Conditions for groups and for their answers. A group is selected if it meets all of those for groups and, where
    an answer is asked for, one of its answers meets all the others."""

    environment: str | None = None
    problem: str | None = None
    """First characters of the problem's digest."""
    signal: bool | None = None
    lost: bool = False
    reward: tuple[float, float] | None = None
    """Lowest and highest reward of an answer."""
    reason: str | None = None
    length: tuple[float, float] | None = None
    text: str | None = None
    """Part of the prompt, or of a recorded answer, in upper or lower case."""

    @property
    def of_answers(self) -> bool:
        return (self.reward, self.reason, self.length) != (None, None, None)


def has_signal(group: GroupLine) -> bool:
    """Whether the rewards of a group differ, so that its answers can have advantages."""
    return len(set(group.rewards)) > 1


def answers_of(group: GroupLine, wanted: Wanted) -> list[int]:
    lowest, highest = wanted.reward or (-math.inf, math.inf)
    least, most = wanted.length or (0, math.inf)
    return [
        place
        for place, (reward, length, reason) in enumerate(
            zip(group.rewards, group.lengths, group.finish_reasons, strict=True)
        )
        if lowest <= reward <= highest and least <= length <= most and wanted.reason in (None, reason)
    ]


def selected(groups: Iterable[GroupLine], wanted: Wanted) -> Iterator[tuple[GroupLine, list[int]]]:
    """Yield the groups that meet the conditions, each with the places of its answers that do."""
    for group in groups:
        if wanted.environment not in (None, group.environment):
            continue
        if wanted.problem is not None and not group.problem.startswith(wanted.problem):
            continue
        if wanted.signal not in (None, has_signal(group)) or (wanted.lost and not group.failures):
            continue
        if wanted.text is not None and not _contains(group, wanted.text):
            continue
        places = answers_of(group, wanted)
        if places or not wanted.of_answers:
            yield group, places


def _contains(group: GroupLine, text: str) -> bool:
    texts = [group.prompt, *(answer.text for answer in group.answers)]
    return any(text.casefold() in each.casefold() for each in texts)


@dataclass(frozen=True, slots=True)
class ProblemHistory:
    problem: str
    prompt: str
    steps: Sequence[int]
    means: Sequence[float]
    """Mean reward of each group that has answers, in the order of the steps."""
    with_signal: int


def histories(groups: Iterable[GroupLine]) -> list[ProblemHistory]:
    """Return the history of each problem: those without any signal first, then by the mean reward of the last group."""
    of: dict[str, list[GroupLine]] = {}
    for group in groups:
        of.setdefault(group.problem, []).append(group._replace(answers=[]))
    found = [
        ProblemHistory(
            problem,
            its[-1].prompt,
            [group.step for group in its],
            [fmean(group.rewards) for group in its if group.rewards],
            sum(map(has_signal, its)),
        )
        for problem, its in of.items()
    ]
    return sorted(found, key=lambda one: (one.with_signal > 0, one.means[-1] if one.means else -math.inf, one.problem))


def newest_sampled(run: RunDir, last: int) -> list[GroupLine]:
    """Return the groups with answers of the newest step up to `last` that has some; else those of `last`."""
    recent = [*read_rollouts(run, last - STEPS_PER_FILE, last)]
    step = max((group.step for group in recent if group.answers), default=None)
    return [group for group in recent if (group.step == last if step is None else group.step == step and group.answers)]
