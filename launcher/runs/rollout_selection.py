"""Selection of groups and answers from the record of a run's rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from launcher.errors import Failed
from launcher.runs.step_record import newest_step
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import if_readable, read
from megatron_rl.contract.rollout_records import STEPS_PER_FILE, GroupLine, read_rollouts
from megatron_rl.contract.run_records import Fork


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


def recorded_groups(run: RunDir, steps: tuple[float, float] | None) -> Iterator[GroupLine]:
    """Groups of the steps from:to; None: of the newest with sampled groups. Raises Failed where the run has no such
    steps."""
    newest = newest_step(run)
    if steps is None:
        return iter(newest_sampled(run, newest))
    first, last = max(1, steps[0]), min(newest, steps[1])
    if first > last:
        raise Failed(f"{run.root.name} has no step {steps[0]:g} yet: its newest is {newest}")
    return read_rollouts(run, int(first), int(last))


def nothing_fits(run: RunDir) -> str:
    """Explain why a selection may be empty."""
    fork = if_readable(read(Fork, run.fork))
    parent = f". Steps up to {fork.step} are recorded in {fork.source}, from which the run was forked" if fork else ""
    return (
        f"{run.root.name}: no recorded group fits. --step asks for other steps, 1 to {newest_step(run)}; only sampled "
        f"groups have texts (logging.samples_every){parent}"
    )
