"""One inference replica: rows that generate, and answers that wait for a row.

The time between two events is computed by a formula, as if tokens flowed continuously, so no code runs per token.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from launcher.simulate.scenario import Costs

_TOKEN = 1e-6
"""Fraction of a token that rounding may leave of a finished answer."""


@dataclass(slots=True, eq=False)
class Answer:
    """One unfinished answer; it may move between replicas."""

    ordinal: int
    sample: int
    tokens: int
    """Final length."""
    done: float = 0.0
    """Tokens counted so far."""
    counted_at: float = 0.0
    """Decoding step of its replica up to which `done` is counted."""
    sampled: list[tuple[int, float]] = field(default_factory=list)
    """(policy version, tokens sampled by it), in order."""


class Replica:
    """A replica that generates `rows` answers at once, first come, first served."""

    def __init__(self, costs: Costs, prompt_tokens: int, version: int, now: float) -> None:
        self.changes = 0
        """Number of changes that make an earlier value of `next_end` wrong."""
        self.planned = 0
        """Value of `changes` for which the end of the next answer is in the event queue."""
        self._costs = costs
        self._prompt_tokens = prompt_tokens
        self._version = version
        self._clock = now  # computed up to here
        self._busy_s = 0.0
        self._steps = 0.0  # decoding steps so far
        self._cached = 0.0  # tokens in the caches of all rows
        self._rows: list[tuple[float, int, Answer]] = []  # a heap of (last step, tie-breaker, answer)
        self._started = 0
        self._waiting: deque[Answer] = deque()
        self._prefilled: set[int] = set()  # ordinals whose prompt is in the cache

    @property
    def outstanding(self) -> int:
        """Unfinished answers."""
        return len(self._rows) + len(self._waiting)

    @property
    def next_end(self) -> float | None:
        """Time at which the next answer ends; None if no row is in use."""
        if not self._rows:
            return None
        return self._clock + self._costs.decode.seconds(len(self._rows), self._cached, self._rows[0][0] - self._steps)

    def busy_by(self, now: float) -> float:
        """Seconds in which the replica computed."""
        self._advance(now)
        return self._busy_s

    def submit(self, answers: list[Answer], now: float) -> None:
        self._advance(now)
        self._waiting.extend(answers)
        self._admit()

    def pop_ended(self, now: float) -> list[Answer]:
        """Remove and return the finished answers; waiting ones take their rows."""
        self._advance(now)
        ended = []
        while self._rows and self._rows[0][0] <= self._steps + _TOKEN:
            _, _, answer = heapq.heappop(self._rows)
            self._count(answer, answer.tokens - answer.done)
            self._cached -= self._prompt_tokens + answer.tokens
            ended.append(answer)
        if not self._rows:
            self._cached = 0.0
        self._admit()
        return ended

    def swap(self, version: int, now: float) -> None:
        """Continue all rows with these weights."""
        self._count_rows(now)
        self._version = version

    def stop(self, now: float) -> list[Answer]:
        """Remove and return all answers, with the tokens that they have at `now`, in the order of their start."""
        self._count_rows(now)
        left = [answer for _, _, answer in sorted(self._rows, key=lambda row: row[1])] + [*self._waiting]
        self._rows, self._cached = [], 0.0
        self._waiting.clear()
        self._prefilled.clear()
        self.changes += 1
        return left

    def _advance(self, now: float) -> None:
        if now <= self._clock:
            return
        if rows := len(self._rows):
            steps = self._costs.decode.steps(rows, self._cached, now - self._clock)
            self._steps += steps
            self._cached += rows * steps
            self._busy_s += now - self._clock
        self._clock = now

    def _admit(self) -> None:
        computed = 0.0
        while self._waiting and len(self._rows) < self._costs.rows:
            answer = self._waiting.popleft()
            if answer.ordinal not in self._prefilled:
                self._prefilled.add(answer.ordinal)
                computed += self._prompt_tokens
            computed += answer.done
            self._started += 1
            answer.counted_at = self._steps
            heapq.heappush(self._rows, (self._steps + answer.tokens - answer.done, self._started, answer))
            self._cached += self._prompt_tokens + answer.done
        seconds = computed * self._costs.prefill_token_s
        self._clock += seconds
        self._busy_s += seconds
        self.changes += 1

    def _count_rows(self, now: float) -> None:
        self._advance(now)
        for last, _, answer in self._rows:
            self._count(answer, min(self._steps, last) - answer.counted_at)

    def _count(self, answer: Answer, tokens: float) -> None:
        """Credit tokens to the current version."""
        answer.done += tokens
        answer.counted_at = self._steps
        if tokens:
            answer.sampled.append((self._version, tokens))
