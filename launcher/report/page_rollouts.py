"""Pure: the rollouts of a page. All groups that were read are counted; a page holds the rewards of many, and the tokens
of some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean

from launcher.report.tokens import ShownSequence, shown_sequence
from launcher.runs.rollout_selection import has_signal
from megatron_rl.contract.rollout_records import GroupLine

MOST_ANSWERS = 150_000
"""Answers whose rewards and lengths are in a page: about 2 MB."""
MOST_TOKENS = 80_000
"""Tokens of sampled answers in a page: about 4 MB."""
MOST_PROBLEMS = 3_000
SHORT_PROMPT = 120


@dataclass(frozen=True, slots=True)
class SampledGroup:
    prompt: str
    advantages: list[float]
    answers: list[ShownAnswer]


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    components: dict[str, float]
    tool_calls: int | None
    output: str
    sequences: list[ShownSequence]


@dataclass(frozen=True, slots=True)
class ProblemRow:
    problem: int
    """Place in `Rollouts.problems`."""
    groups: int
    with_signal: int
    first: float | None
    last: float | None


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Groups in columns: an entry of each list for each group that a page holds."""

    steps: list[int] = field(default_factory=list)
    ordinals: list[int] = field(default_factory=list)
    problem: list[int] = field(default_factory=list)
    environment: list[int] = field(default_factory=list)
    rewards: list[list[float]] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    reasons: list[list[int]] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    passed_over: list[int] = field(default_factory=list)
    sample: list[int] = field(default_factory=list)
    """Place in `samples`, -1 for a group without tokens."""
    samples: list[SampledGroup] = field(default_factory=list)
    problems: list[list[str]] = field(default_factory=list)
    """Digest and prompt of each problem."""
    names: list[str] = field(default_factory=list)
    history: list[ProblemRow] = field(default_factory=list)
    all_groups: int = 0
    all_sampled: int = 0
    all_problems: int = 0


@dataclass(slots=True)
class _Visits:
    prompt: str
    groups: int = 0
    with_signal: int = 0
    first: float | None = None
    last: float | None = None


class RolloutCollector:
    """Reader of groups in the order of their steps, which keeps no more of them than a page holds."""

    def __init__(self, most_answers: int = MOST_ANSWERS, most_tokens: int = MOST_TOKENS) -> None:
        self._most_answers, self._most_tokens = most_answers, most_tokens
        self._groups: list[GroupLine] = []
        self._sampled: dict[tuple[int, int], GroupLine] = {}
        self._visits: dict[str, _Visits] = {}
        self._answers = self._tokens = self._all = self._all_sampled = 0
        self.first: list[GroupLine] = []
        """Groups with tokens of the first step that has some."""
        self.last: list[GroupLine] = []

    def add(self, group: GroupLine) -> None:
        self._all += 1
        visits = self._visits.setdefault(group.problem, _Visits(group.prompt))
        visits.groups += 1
        visits.with_signal += has_signal(group)
        if group.rewards:
            mean = fmean(group.rewards)
            visits.first = mean if visits.first is None else visits.first
            visits.last = mean
        if group.answers:
            self._all_sampled += 1
            self.first += [group] if not self.first or self.first[0].step == group.step else []
            self.last = [*(self.last if self.last and self.last[0].step == group.step else []), group]
            self._sampled[group.step, group.ordinal] = group
            self._tokens += tokens_of(group)
            if self._tokens > 2 * self._most_tokens:
                self._thin_sampled()
        self._groups.append(group._replace(answers=[]) if group.answers else group)
        self._answers += len(group.rewards)
        if self._answers > 2 * self._most_answers:
            self._thin_groups()

    def rollouts(self) -> Rollouts:
        """The groups that a page holds: the newest ones, and evenly spaced ones before them."""
        self._thin_groups()
        self._thin_sampled()
        kept = {(group.step, group.ordinal): group for group in self._groups}
        kept |= {key: group._replace(answers=[]) for key, group in self._sampled.items()}
        names: dict[str, int] = {}  # text -> its place
        problems: dict[str, int] = {}
        made = Rollouts(all_groups=self._all, all_sampled=self._all_sampled, all_problems=len(self._visits))
        for key, group in sorted(kept.items()):
            made.steps.append(group.step)
            made.ordinals.append(group.ordinal)
            made.problem.append(problems.setdefault(group.problem, len(problems)))
            made.environment.append(names.setdefault(group.environment, len(names)))
            made.rewards.append([_rounded(reward) for reward in group.rewards])
            made.lengths.append(group.lengths)
            made.reasons.append([names.setdefault(reason, len(names)) for reason in group.finish_reasons])
            made.lost.append(sum(group.failures.values()))
            made.versions.append([group.lowest_version, group.highest_version])
            made.passed_over.append(names.setdefault(group.passed_over, len(names)))
            sampled = self._sampled.get(key)
            made.sample.append(len(made.samples) if sampled else -1)
            if sampled:
                made.samples.append(_sample(sampled))
        rows = sorted(self._visits.items(), key=lambda one: (one[1].with_signal > 0, -one[1].groups))[:MOST_PROBLEMS]
        for problem, its in rows:
            place = problems.setdefault(problem, len(problems))
            made.history.append(ProblemRow(place, its.groups, its.with_signal, its.first, its.last))
        made.problems.extend([problem, self._visits[problem].prompt[:SHORT_PROMPT]] for problem in problems)
        made.names.extend(names)
        return made

    def _thin_groups(self) -> None:
        places = thinned([len(group.rewards) for group in self._groups], self._most_answers)
        self._groups = [self._groups[place] for place in places]
        self._answers = sum(len(group.rewards) for group in self._groups)

    def _thin_sampled(self) -> None:
        groups = list(self._sampled.items())
        places = thinned([tokens_of(group) for _, group in groups], self._most_tokens)
        self._sampled = dict(groups[place] for place in places)
        self._tokens = sum(tokens_of(group) for group in self._sampled.values())


def thinned(sizes: Sequence[int], most: int) -> list[int]:
    """Places of the entries to keep so that their sizes sum to at most `most`: the newest ones, which are last, in half
    of it, and evenly spaced ones before them in the rest. The very newest entry is kept whatever its size."""
    if sum(sizes) <= most:
        return list(range(len(sizes)))
    # Half of the room for the end of the run, which people look at first, and half for an overview of what led there.
    # Sizes 10, 10, 10, 10, 10, 10, 30 with room for 60: the last entry fills the half of 30, and of the six before it
    # each second one fits into the rest. Adding as many as fit from the front instead would show the start and the end
    # only.
    newest, used = len(sizes), 0
    while newest and (used + sizes[newest - 1] <= most // 2 or newest == len(sizes)):
        newest -= 1
        used += sizes[newest]
    older = range(newest)
    stride = 2
    while sum(sizes[place] for place in older[::stride]) > most - used and stride <= len(sizes):
        stride += 1
    spaced = [place for place in older[::stride] if stride <= len(sizes)]
    return [*spaced, *range(newest, len(sizes))]


def tokens_of(group: GroupLine) -> int:
    return sum(len(sequence.tokens) for answer in group.answers for sequence in answer.sequences)


def collect(groups: Iterable[GroupLine]) -> RolloutCollector:
    collector = RolloutCollector()
    for group in groups:
        collector.add(group)
    return collector


@cache
def _rounded(reward: float) -> float:
    return float(f"{reward:.4g}")


def _sample(group: GroupLine) -> SampledGroup:
    answers = [
        ShownAnswer(one.components, one.tool_calls, one.output, [shown_sequence(each) for each in one.sequences])
        for one in group.answers
    ]
    return SampledGroup(group.prompt, group.advantages, answers)
