"""All inference replicas of a run: which of them generates which answers, and where these go when one is lost.

Partitioned, a group goes to the replica with the fewest unfinished answers; co-located, each replica has a fixed share
of the batch. The answers of a group stay together until their replica is lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count, groupby

from launcher.simulate.replica import Answer, Replica
from launcher.simulate.scenario import Scenario

Event = Callable[[float], None]
"""Called with the time at which it happens."""


class EventQueue:
    """Future events. Simultaneous events happen in the order in which they were added."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Event]] = []
        self._added = count()

    def at(self, time: float, event: Event) -> None:
        heapq.heappush(self._events, (time, next(self._added), event))

    def clear(self) -> None:
        self._events.clear()

    def run_next(self) -> None:
        time, _, event = heapq.heappop(self._events)
        event(time)


class Pool:
    """The replicas of one run; `start` begins each attempt and `stop` ends it."""

    def __init__(self, scenario: Scenario, queue: EventQueue, answered: Callable[[Answer, float], None]) -> None:
        """answered: called with each finished answer and the time."""
        self.lost = 0
        self._scenario = scenario
        self._queue = queue
        self._answered = answered
        self._replicas: list[Replica | None] = []
        self._version = 0
        self._homeless: list[Answer] = []  # submitted while all replicas were lost
        self._past_busy_s = 0.0  # of replicas that have ended

    def busy_s(self, now: float) -> float:
        """Seconds in which a replica computed so far, mean over the replicas."""
        current = sum(replica.busy_by(now) for replica in self._replicas if replica)
        return (self._past_busy_s + current) / self._scenario.split.replicas

    def start(self, version: int, now: float) -> None:
        """Start all replicas idle, with these weights."""
        self._version = version
        self._replicas = [self._new(now) for _ in range(self._scenario.split.replicas)]

    def submit(self, answers: Iterable[Answer], now: float) -> None:
        """Distribute answers over the replicas that are up."""
        up = [(number, replica) for number, replica in enumerate(self._replicas) if replica is not None]
        least = [(replica.outstanding, number, replica) for number, replica in up]
        heapq.heapify(least)
        prompts = self._scenario.work.prompts
        for ordinal, of_group in groupby(answers, key=lambda answer: answer.ordinal):
            group = list(of_group)
            if not up:
                self._homeless += group
            elif self._scenario.split.colocated:
                up[ordinal % prompts * len(up) // prompts][1].submit(group, now)
            else:
                outstanding, number, replica = least[0]
                heapq.heapreplace(least, (outstanding + len(group), number, replica))
                replica.submit(group, now)
        for _, replica in up:
            self._schedule_end(replica)

    def swap(self, version: int, now: float) -> None:
        """Continue on all replicas with these weights."""
        self._version = version
        for replica in filter(None, self._replicas):
            replica.swap(version, now)

    def lose_node(self, node: int, now: float) -> None:
        """Lose the replicas of the `node`-th inference node for a while; the others take over their answers."""
        left: list[Answer] = []
        for number in self._scenario.split.replicas_on(node):
            if (replica := self._replicas[number]) is not None:
                left += self._end(replica, now)
                self._replicas[number] = None
                self.lost += 1
                self._queue.at(now + self._scenario.faults.replica_restart_s, partial(self._restart, number))
        self.submit(left, now)

    def pause(self, now: float) -> list[Answer]:
        """Free all rows and return their unfinished answers, in order of prompt and sample."""
        left = [answer for replica in filter(None, self._replicas) for answer in replica.stop(now)]
        return sorted(left, key=lambda answer: (answer.ordinal, answer.sample))

    def stop(self, now: float) -> list[Answer]:
        """End all replicas and return their unfinished answers, in order of prompt and sample."""
        left, self._homeless = self._homeless, []
        for replica in self._replicas:
            if replica is not None:
                left += self._end(replica, now)
        self._replicas = []
        return sorted(left, key=lambda answer: (answer.ordinal, answer.sample))

    def _new(self, now: float) -> Replica:
        return Replica(self._scenario.costs, self._scenario.work.prompt_tokens, self._version, now)

    def _end(self, replica: Replica, now: float) -> list[Answer]:
        left = replica.stop(now)
        self._past_busy_s += replica.busy_by(now)
        return left

    def _restart(self, number: int, now: float) -> None:
        self._replicas[number] = self._new(now)
        homeless, self._homeless = self._homeless, []
        self.submit(homeless, now)

    def _schedule_end(self, replica: Replica) -> None:
        """Queue the end of the replica's next answer; it is ignored if the replica changes before."""
        if replica.planned != replica.changes:
            replica.planned = replica.changes
            if (end := replica.next_end) is not None:
                self._queue.at(end, partial(self._handle_end, replica, replica.changes))

    def _handle_end(self, replica: Replica, changes: int, now: float) -> None:
        if replica.changes == changes:
            for answer in replica.pop_ended(now):
                self._answered(answer, now)
            self._schedule_end(replica)
