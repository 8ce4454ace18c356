"""One inference replica: rows in flight, and answers that wait for one. Time between two events is computed by formula,
as if tokens flowed, so nothing is done for each token."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from launcher.simulate.scenario import Costs

_TOKEN = 1e-6
"""Part of a token that rounding may leave of an answer."""


@dataclass(slots=True, eq=False)
class Answer:
    """One answer on its way, over as many replicas as it takes."""

    ordinal: int
    sample: int
    tokens: int
    """That it will have."""
    done: float = 0.0
    """Tokens that it has."""
    sampled: list[tuple[int, float]] = field(default_factory=list)
    """(version, tokens sampled by it), in their order."""


class Replica:
    """Answers `rows` at once, the first come first."""

    def __init__(self, costs: Costs, prompt_tokens: int, version: int, now: float) -> None:
        self.changes = 0
        """Grows whenever what it will do next is no longer what it was."""
        self.planned = 0
        """`changes` when somebody last looked what it will do next."""
        self._costs = costs
        self._prompt_tokens = prompt_tokens
        self._clock = now  # until when it has computed
        self._busy_s = 0.0
        self._steps = 0.0  # so far
        self._cached = 0.0  # tokens in the caches of all rows
        self._rows: list[tuple[float, int, float, Answer]] = []  # (last step, tie, first step, answer), a heap
        self._begun = 0
        self._waiting: deque[Answer] = deque()
        self._versions: list[tuple[float, int]] = [(0.0, version)]  # (first step, version)
        self._prefilled: set[int] = set()  # ordinals whose prompt is in the cache

    @property
    def outstanding(self) -> int:
        """Answers that it has to give."""
        return len(self._rows) + len(self._waiting)

    @property
    def next_end(self) -> float | None:
        """When the next answer ends; None where it has none."""
        if not self._rows:
            return None
        return self._clock + self._costs.decode.seconds(len(self._rows), self._cached, self._rows[0][0] - self._steps)

    def busy_by(self, now: float) -> float:
        """Seconds in which it had anything to compute."""
        self._advance(now)
        return self._busy_s

    def submit(self, answers: list[Answer], now: float) -> None:
        """Take these on."""
        self._advance(now)
        self._waiting.extend(answers)
        self._admit()

    def ended(self, now: float) -> list[Answer]:
        """Those that have all their tokens; waiting ones take their rows."""
        self._advance(now)
        gone = []
        while self._rows and self._rows[0][0] <= self._steps + _TOKEN:
            _, _, begun, answer = heapq.heappop(self._rows)
            self._note(answer, begun, answer.tokens - answer.done)
            self._cached -= self._prompt_tokens + answer.tokens
            gone.append(answer)
        if not self._rows:
            self._cached = 0.0
        self._admit()
        return gone

    def swap(self, version: int, now: float) -> None:
        """Go on with these weights."""
        self._advance(now)
        self._versions.append((self._steps, version))
        self.stand_still(self._costs.swap_s, now)

    def stand_still(self, seconds: float, now: float) -> None:
        """Compute nothing for so long."""
        self._advance(now)
        self._clock += seconds
        self.changes += 1

    def stop(self, now: float) -> list[Answer]:
        """Give up all that it has: answers with the tokens that they have at `now`, in the order in which they came."""
        self._advance(now)
        left = []
        for last, _, begun, answer in sorted(self._rows, key=lambda row: row[1]):
            self._note(answer, begun, min(self._steps, last) - begun)
            left.append(answer)
        left += self._waiting
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
            self._begun += 1
            last = self._steps + answer.tokens - answer.done
            heapq.heappush(self._rows, (last, self._begun, self._steps, answer))
            self._cached += self._prompt_tokens + answer.done
        seconds = computed * self._costs.prefill_token_s
        self._clock += seconds
        self._busy_s += seconds
        self.changes += 1

    def _note(self, answer: Answer, begun: float, tokens: float) -> None:
        answer.done += tokens
        answer.sampled += self._by_version(begun, begun + tokens)

    def _by_version(self, first: float, last: float) -> Iterator[tuple[int, float]]:
        """(version, steps) of the steps from `first` to `last`."""
        end, found = last, []
        for begun, version in reversed(self._versions):
            if begun < end:
                found.append((version, end - max(begun, first)))
                end = max(begun, first)
            if begun <= first:
                break
        return reversed(found)
