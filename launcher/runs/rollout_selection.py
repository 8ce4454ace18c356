"""Selection of groups and answers from the record of a run's rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.rollout_records import STEPS_PER_FILE, GroupLine, read_rollouts


@dataclass(frozen=True, slots=True)
class Wanted:
    """Conditions for groups and for their answers. A group is selected if it meets all of those for groups and, where
    an answer is asked for, one of its answers meets all the others."""

    environment: str | None = None
    problem: str | None = None
    signal: bool | None = None
    reward: tuple[float, float] | None = None
    reason: str | None = None

    @property
    def of_answers(self) -> bool:
        return (self.reward, self.reason) != (None, None)


def has_signal(group: GroupLine) -> bool:
    """Whether the rewards of a group differ, so that its answers can have advantages."""
    return len(set(group.rewards)) > 1


def answers_of(group: GroupLine, wanted: Wanted) -> list[int]:
    lowest, highest = wanted.reward or (-math.inf, math.inf)
    answers = enumerate(zip(group.rewards, group.finish_reasons, strict=True))
    return [
        place for place, (reward, reason) in answers if lowest <= reward <= highest and wanted.reason in (None, reason)
    ]


def selected(groups: Iterable[GroupLine], wanted: Wanted) -> Iterator[tuple[GroupLine, list[int]]]:
    """Yield the groups that meet the conditions, each with the places of its answers that do."""
    for group in groups:
        if wanted.environment not in (None, group.environment):
            continue
        if wanted.problem is not None and not group.problem.startswith(wanted.problem):
            continue
        if wanted.signal not in (None, has_signal(group)):
            continue
        places = answers_of(group, wanted)
        if places or not wanted.of_answers:
            yield group, places


def newest_sampled(run: RunDir, last: int) -> list[GroupLine]:
    """Return the groups with answers of the newest step up to `last` that has some; else those of `last`."""
    recent = [*read_rollouts(run, last - STEPS_PER_FILE, last)]
    step = max((group.step for group in recent if group.answers), default=None)
    return [group for group in recent if (group.step == last if step is None else group.step == step and group.answers)]
