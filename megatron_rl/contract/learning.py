"""Rules about what hinders learning, and the numbers that they read.

A rule is a row of a table: the metric it is about, its condition with the limits, the evidence that it finds, and what
to try. `window_rules` has those that need only the newest lines of metrics.jsonl: the warnings of a run.
`launcher.explain` adds those that need the beginning of the record, its answers or the recipe. `mrl help METRIC`
and docs/metrics.md show the rows, so that a limit stands nowhere else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from operator import mul
from typing import Callable, Generic, NamedTuple, TypeVar

from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.shapes import LARGEST_FLOAT, LARGEST_INT

WINDOW = 10  # steps that most rules look back: enough to ignore one odd batch, few enough to warn early
LEAST = 3  # fewest steps of a mean: the first batches of a small run may all be odd
SOLVED = 0.9  # share of right answers above which the rewards need not rise further
TREND_STEPS = 300  # steps before quarters of a run are compared: the demo with a lag has a dip in its first 200
NO_SIGNAL = "no signal"  # reason in dropped_ordinals for prompts rejected by dynamic sampling, which is intended

Evidence = TypeVar("Evidence")


class Seen(NamedTuple):
    text: str  # one sentence with numbers, without a full stop
    since: int | None = None  # first step at which the condition holds, if the rule knows it


@dataclass(frozen=True)
class Rule(Generic[Evidence]):
    """A row of the table of rules. Texts name keys of a recipe as they are written there."""

    about: str  # a registered metric; empty for facts about prompts
    condition: str  # clause with the limits, such as `half of the answers or more were cut`
    find: Callable[[Evidence], Seen | None]  # returns what is seen; None if the condition does not hold
    advice: str  # one or more sentences on what to try


class Hindrance(NamedTuple):
    """Something in the record of a run that hinders learning, or may."""

    name: str  # of the rule
    since: int | None
    seen: str
    advice: str

    def __str__(self) -> str:
        return f"{self.seen} (since step {self.since}). {self.advice}"


def number(line: MetricsLine, name: str) -> float | None:
    """Return a value of one step; None if it was not finite, is too large for arithmetic, or was not measured."""
    value = line.values.get(name)
    if type(value) is int and abs(value) <= LARGEST_INT:  # not isinstance: a bool is an int
        return value
    return value if type(value) is float and abs(value) <= LARGEST_FLOAT else None


def numbers(lines: Iterable[MetricsLine], name: str) -> list[float]:
    return [value for line in lines if (value := number(line, name)) is not None]


def column(lines: Iterable[MetricsLine], name: str) -> list[float | None]:
    """Return the value of each step as `number` does."""
    return [
        value if type(value := line.values.get(name)) is float or value is None else number(line, name)
        for line in lines
    ]


class Recent:
    """The newest steps of a record, at most WINDOW, and the mean rewards of all steps."""

    def __init__(
        self,
        lines: Iterable[MetricsLine] = (),
        rewards: Iterable[float] = (),
        best: tuple[float, float, int] | None = None,
        varied: bool = False,
    ) -> None:
        """
        lines: newest lines so far.
        rewards: mean rewards of all steps so far that have one.
        """
        self.lines: deque[MetricsLine] = deque(lines, maxlen=WINDOW)
        self._values: dict[str, list[float]] = {}
        self.rewards = [*rewards]
        # Of the first 0, 1, 2, ... rewards:
        self._sums = [*accumulate(self.rewards, initial=0.0)]
        self._squares = [*accumulate(map(mul, self.rewards, self.rewards), initial=0.0)]
        self.best = best
        """Largest mean reward of WINDOW steps, its standard error, and the step that completed it; None before."""
        self.varied = varied  # whether the answers of any step have had different rewards

    def add(self, line: MetricsLine) -> None:
        self.lines.append(line)
        self._values.clear()
        reward = number(line, "mean_reward")
        if reward is not None:
            self.rewards.append(reward)
            self._sums.append(self._sums[-1] + reward)
            self._squares.append(self._squares[-1] + reward * reward)
            if len(self.rewards) >= WINDOW:
                found = (*self.rewards_of(len(self.rewards)), line.step)
                self.best = found if self.best is None else max(self.best, found)
        self.varied = self.varied or bool(number(line, "reward_std"))

    def rewards_of(self, end: int, count: int = WINDOW) -> tuple[float, float]:
        """Return the mean of `count` mean rewards, and its standard error.

        end: number of rewards up to the last of them.
        """
        low, high = (self._sums[end - count], self._squares[end - count]), (self._sums[end], self._squares[end])
        return mean_and_error(low, high, count)

    @property
    def first(self) -> int:
        return self.lines[0].step

    @property
    def span(self) -> str:
        return f"the last {len(self.lines)} steps" if len(self.lines) > 1 else "the last step"

    def values(self, name: str) -> list[float]:
        if name not in self._values:  # several rules ask for the same
            self._values[name] = numbers(self.lines, name)
        return self._values[name]

    def mean(self, name: str) -> float | None:
        """Return the mean; None if fewer than LEAST steps have a value."""
        values = self.values(name)
        return sum(values) / len(values) if len(values) >= LEAST else None

    def steps_without(self, name: str) -> list[int]:
        """Return the steps with an update whose value is missing: numbers that are not finite are not recorded."""
        updated = (line for line in self.lines if number(line, "learning_rate") is not None)
        return [line.step for line in updated if number(line, name) is None]

    def since(self, name: str, least: float) -> int:
        """Return the first step whose absolute value is at least `least`."""
        return next((line.step for line in self.lines if abs(number(line, name) or 0) >= least), self.first)


def mean_and_error(low: tuple[float, float], high: tuple[float, float], count: int) -> tuple[float, float]:
    """Return the mean of `count` values and its standard error, from the sums of values and of squares before and after
    them."""
    mean, squares = (high[0] - low[0]) / count, (high[1] - low[1]) / count
    return mean, sqrt(max(0.0, squares - mean * mean) / count)
