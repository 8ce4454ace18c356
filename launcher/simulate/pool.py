"""The replicas of a run: which of them answers what, and what becomes of that when one is lost.

Partitioned, a group goes to the replica with the fewest answers to give; co-located, each replica has its share of the
batch. Answers of a group stay together until a replica is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from heapq import heapify, heapreplace
from itertools import groupby

from launcher.simulate.agenda import Agenda
from launcher.simulate.replica import Answer, Replica
from launcher.simulate.scenario import Scenario


class Pool:
    """All replicas, from the begin of an attempt to its end; `start` begins another one."""

    def __init__(self, scenario: Scenario, agenda: Agenda, answered: Callable[[Answer, float], None]) -> None:
        """answered: called with each answer that has ended, and when."""
        self.lost = 0
        self._scenario = scenario
        self._agenda = agenda
        self._answered = answered
        self._replicas: list[Replica | None] = []
        self._version = 0
        self._homeless: list[Answer] = []  # while there is no replica
        self._past_busy_s = 0.0  # of replicas that are no more

    def busy_s(self, now: float) -> float:
        """In which a replica had anything to compute by now, mean over them."""
        there = sum(replica.busy_by(now) for replica in self._replicas if replica)
        return (self._past_busy_s + there) / self._scenario.split.replicas

    def start(self, version: int, now: float) -> None:
        """Have all replicas, with these weights and nothing to do."""
        self._version = version
        self._replicas = [self._new(now) for _ in range(self._scenario.split.replicas)]

    def submit(self, answers: Iterable[Answer], now: float) -> None:
        """Have these answered."""
        there = [(number, replica) for number, replica in enumerate(self._replicas) if replica is not None]
        least = [(replica.outstanding, number, replica) for number, replica in there]
        heapify(least)
        prompts = self._scenario.work.prompts
        for ordinal, of_group in groupby(answers, key=lambda answer: answer.ordinal):
            group = list(of_group)
            if not there:
                self._homeless += group
            elif self._scenario.split.colocated:
                there[ordinal % prompts * len(there) // prompts][1].submit(group, now)
            else:
                outstanding, number, replica = least[0]
                heapreplace(least, (outstanding + len(group), number, replica))
                replica.submit(group, now)
        for _, replica in there:
            self._await(replica)

    def swap(self, version: int, now: float) -> None:
        """Have all replicas go on with these weights."""
        self._version = version
        self._have_all(lambda replica: replica.swap(version, now))

    def stand_still(self, seconds: float, now: float) -> None:
        """Have all replicas compute nothing for so long."""
        self._have_all(lambda replica: replica.stand_still(seconds, now))

    def _have_all(self, do: Callable[[Replica], None]) -> None:
        for replica in self._replicas:
            if replica is not None:
                do(replica)
                self._await(replica)

    def lose_node(self, node: int, now: float) -> None:
        """Have the `node`-th that generates gone for a while; others go on with what was being answered there."""
        left: list[Answer] = []
        for number in self._scenario.split.replicas_on(node):
            if (replica := self._replicas[number]) is not None:
                left += self._end(replica, now)
                self._replicas[number] = None
                self.lost += 1
                back = now + self._scenario.faults.replica_restart_s
                self._agenda.at(back, partial(self._put_back, number))
        self.submit(left, now)

    def stop(self, now: float) -> list[Answer]:
        """End all replicas; what they had, with the tokens that are there already, in the order of ordinals."""
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

    def _put_back(self, number: int, now: float) -> None:
        self._replicas[number] = self._new(now)
        homeless, self._homeless = self._homeless, []
        self.submit(homeless, now)

    def _await(self, replica: Replica) -> None:
        """See to the next end of an answer, unless something else comes first."""
        if replica.planned != replica.changes:
            replica.planned = replica.changes
            if (end := replica.next_end) is not None:
                self._agenda.at(end, partial(self._ended, replica, replica.changes))

    def _ended(self, replica: Replica, changes: int, now: float) -> None:
        if replica.changes == changes:
            for answer in replica.ended(now):
                self._answered(answer, now)
            self._await(replica)
