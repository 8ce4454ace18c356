"""The replica that is asked is the one that a look at all replicas and all requests would find, whatever happens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.engine.interface import Delta, GenerationRequest
from megatron_rl.generate.replicas.dispatch import Dispatch
from megatron_rl.generate.replicas.link import ReplicaLink
from megatron_rl.generate.replicas.links import ALL
from megatron_rl.generate.replicas.paces import MEASURED_S, SLOWER, DecodePace, too_slow
from megatron_rl.generate.replicas.ranking import Ranking
from megatron_rl.generate.replicas.unanswered import Unanswered
from megatron_rl.generate.replicas.wire import PROTOCOL, About, News, Refusal, State
from megatron_rl.recipe.inference import Sampling

NUMBERS = st.integers(0, 11)
LAGS = st.sampled_from([0, 0, 0, -1, -1, 1, None])
"""Versions by which a replica is behind the driver; None: it has no weights."""
STATES = st.sampled_from(["awake", "awake", "awake", "awake", "asleep", "down"])
PIECES = st.lists(st.tuples(NUMBERS, st.integers(0, 1), st.integers(0, 3), st.booleans()), max_size=6)
ASK = st.tuples(st.just("ask"), st.none() | st.integers(0, 6), st.integers(1, 2), st.integers(1, 2))
NEWS = st.tuples(st.just("news"), NUMBERS, LAGS, STATES, PIECES, st.lists(NUMBERS, max_size=2))
BEGIN = [("connect",), ("connect",), ("connect",), *(("report", number, 0, "awake") for number in range(3))]
EVENTS = st.lists(
    st.one_of(
        *[ASK] * 4,
        *[NEWS] * 2,
        st.tuples(st.just("connect")),
        st.tuples(st.just("report"), NUMBERS, LAGS, STATES),
        st.tuples(st.just("cancel"), NUMBERS),
        st.tuples(st.sampled_from(["lose", "slow"]), NUMBERS),
        st.tuples(st.sampled_from(["hold", "new version"])),
    ),
    min_size=10,
    max_size=40,
)
LENGTH = 4


@dataclass(eq=False)
class Replica:
    number: int
    version: int | None = None
    state: State | None = None
    """None before its first report."""
    slow: bool = False


@dataclass(eq=False)
class Asked:
    request: GenerationRequest
    told: list[int]
    """Tokens of each sample."""
    left: list[int]
    """Tokens that each sample lacks; 0 once its replica has said that it has ended."""
    replica: Replica | None = None

    @property
    def outstanding(self) -> int:
        left = sum(self.left)
        return left + (len(self.request.prompt_tokens) if left else 0)


@dataclass
class PlainRule:
    """The rule, by a look at all replicas for each request and at all requests for each event."""

    policy_version: int = 0
    replicas: list[Replica] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    homes: dict[int, Replica] = field(default_factory=dict)
    newest: int = -1
    held_after: int | None = None

    def place_waiting(self) -> None:
        for asked in self.asked:
            if asked.replica is None:
                self.place(asked)

    def place(self, asked: Asked) -> None:
        ordinal = asked.request.ordinal
        if self.held_after is not None and (ordinal is None or ordinal > self.held_after):
            return
        ready = [each for each in self.replicas if each.state == "awake" and self.policy_version <= (each.version or 0)]
        ready = [each for each in ready if each.version is not None]
        candidates = [each for each in ready if not each.slow] or ready
        if not candidates:
            return
        home = None if ordinal is None else self.homes.get(ordinal)
        asked.replica = home if home in candidates else min(candidates, key=self.outstanding)
        if ordinal is not None:
            self.homes[ordinal] = asked.replica

    def outstanding(self, replica: Replica) -> int:
        return sum(asked.outstanding for asked in self.asked if asked.replica is replica)

    def move(self, replica: Replica) -> None:
        moved = [asked for asked in self.asked if asked.replica is replica]
        self.asked = [asked for asked in self.asked if asked not in moved] + moved
        for asked in moved:
            asked.replica = None
            asked.left = [LENGTH - told for told in asked.told]  # another replica must say again which have ended
        self.place_waiting()


class Both:
    """The plain rule, and the dispatch of a driver to which the same happens."""

    def __init__(self) -> None:
        self.plain = PlainRule()
        attempt = RunDir(Path("/nonexistent")).attempt(1)
        self.dispatch = Dispatch(attempt, "digest", "token", ALL, resumes=True, limit_s=60.0)
        self.dispatch.policy_version = 0
        self.links: dict[Replica, ReplicaLink] = {}
        self.numbers = itertools.count()
        self.tasks: dict[Asked, asyncio.Task[Any]] = {}

    async def happen(self, name: str, *what: Any) -> None:
        getattr(self, name.replace(" ", "_"))(*what)
        for _ in range(3):  # the callers of answers notice them
            await asyncio.sleep(0)
        for asked in [asked for asked in self.plain.asked if not any(asked.left)]:
            self.plain.asked.remove(asked)
        places = [(work.unanswered.request.key, work.link) for work in self.dispatch._assignment.requests]
        assert places == [(each.request.key, self.links.get(each.replica)) for each in self.plain.asked]  # type: ignore[arg-type]
        assert [link.outstanding for link in self.links.values()] == [*map(self.plain.outstanding, self.links)]

    def ask(self, ordinal: int | None, prompt: int, samples: int) -> None:
        request = GenerationRequest([1] * prompt, samples, Sampling(max_new_tokens=LENGTH), len(self.tasks), ordinal)
        asked = Asked(request, [0] * samples, [LENGTH] * samples)
        self.plain.asked.append(asked)
        self.plain.newest = max(self.plain.newest, -1 if ordinal is None else ordinal)
        self.plain.place(asked)
        self.tasks[asked] = asyncio.ensure_future(self.dispatch.generate(request))

    def connect(self) -> None:
        replica = Replica(next(self.numbers))
        self.plain.replicas.append(replica)
        address = ReplicaAddress(replica.number, 0, "127.0.0.1", 1, 1, "digest", PROTOCOL, 0.0)
        link = self.links[replica] = self.dispatch._link_to(address)
        self.dispatch._links._links[link.start] = link

    def report(self, number: int, lag: int | None, state: State) -> None:
        if (replica := self._replica(number)) is not None:
            self.links[replica]._learn(self._about(replica, lag, state))

    def news(
        self, number: int, lag: int | None, state: State, pieces: list[tuple[int, int, int, bool]], no: list[int]
    ) -> None:
        if (replica := self._replica(number)) is None:
            return
        link, told = self.links[replica], []
        about = self._about(replica, lag, state)
        there = [asked for asked in self.plain.asked if asked.replica is replica]
        ids = {work.unanswered.request.key: work.id for work in self.dispatch._assignment.requests}
        for place, sample, count, ends in pieces:
            asked = there[place % len(there)] if there else None
            if asked is not None and sample < len(asked.left) and count < asked.left[sample]:
                asked.told[sample] += count
                asked.left[sample] = 0 if ends else asked.left[sample] - count
                delta = Delta(sample, [1] * count, [0.0] * count, [0] * count, None, "stop" if ends else None)
                told.append((ids[asked.request.key], delta))
        refused = {there[place % len(there)] for place in no if there}
        refused = {asked for asked in refused if any(asked.left)}
        refusals = [Refusal(ids[asked.request.key], "other version", "") for asked in refused]
        for asked in refused:
            asked.replica = None
        self.plain.place_waiting()
        link._learn(about)
        self.dispatch._take_news(link, News(about, 1, told, refusals))

    def cancel(self, place: int) -> None:
        if self.plain.asked:
            asked = self.plain.asked.pop(place % len(self.plain.asked))
            self.tasks[asked].cancel()

    def lose(self, number: int) -> None:
        if (replica := self._replica(number)) is not None:
            self.plain.replicas.remove(replica)
            self.plain.move(replica)
            link = self.links.pop(replica)
            del self.dispatch._links._links[link.start]
            self.dispatch._assignment.lose(link)

    def slow(self, number: int) -> None:
        if (replica := self._replica(number)) is not None:
            replica.slow = self.links[replica].slow = True
            self.plain.move(replica)
            self.dispatch._assignment.move(self.links[replica])

    def hold(self) -> None:
        self.plain.held_after = self.plain.newest
        self.dispatch.hold()

    def new_version(self) -> None:
        self.plain.policy_version += 1
        self.plain.held_after = None
        self.plain.homes.clear()
        for replica in self.plain.replicas:
            replica.slow = False
        self.plain.place_waiting()
        self.dispatch.policy_version += 1
        self.dispatch.begin_version()

    def _replica(self, number: int) -> Replica | None:
        there = self.plain.replicas
        return there[number % len(there)] if there else None

    def _about(self, replica: Replica, lag: int | None, state: State) -> About:
        version = None if lag is None else max(0, self.plain.policy_version - lag)
        replica.version, replica.state = version, state
        return About(replica.number, 0, 1, version, 0, 0, 0.0, 0, 0.0, state)


@given(EVENTS)
def test_assignment_is_that_of_the_plain_rule(events: list[tuple[Any, ...]]) -> None:
    async def happen() -> None:
        both = Both()
        for event in (*BEGIN, *events):
            await both.happen(*event)
        for task in both.tasks.values():
            task.cancel()
        await asyncio.gather(*both.tasks.values(), return_exceptions=True)

    asyncio.run(happen())


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=200))
def test_first_of_a_ranking_has_the_smallest_key_or_came_before_its_equals(changes: list[tuple[int, int]]) -> None:
    keys: dict[int, int] = {}
    ranking = Ranking(keys.__getitem__)
    for member, key in changes:
        known, before = member in keys, keys.get(member, 0)
        if known and key == 9:
            ranking.discard(member)
            del keys[member]
        else:
            keys[member] = key
            if not known:
                ranking.add(member)
            elif key < before:
                ranking.note(member)
        assert ranking.first() == min(keys, key=keys.__getitem__, default=None)


PACES = st.builds(
    DecodePace,
    st.sampled_from([0, 1, 500, 1000, 4000]),
    st.sampled_from([0.0, MEASURED_S, 2 * MEASURED_S, SLOWER * MEASURED_S, 9 * MEASURED_S]),
)


@given(st.lists(PACES, max_size=9))
def test_slow_replicas_exceed_the_median_of_all_others(paces: list[DecodePace]) -> None:
    assert too_slow(dict(enumerate(paces))) == _plainly_slow(dict(enumerate(paces)))


def _plainly_slow(paces: Mapping[Hashable, DecodePace]) -> list[Hashable]:
    measured = {key: pace.seconds / max(1, pace.tokens) for key, pace in paces.items() if pace.seconds >= MEASURED_S}
    slow = []
    for key, per_token in measured.items():
        others = [other for name, other in measured.items() if name != key]
        if others and per_token > SLOWER * median(others):
            slow.append(key)
    return slow


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=20), st.integers(0, 20))
def test_outstanding_tokens_are_those_of_unfinished_samples_and_their_prompt(
    pieces: list[tuple[int, int, bool]], moved_after: int
) -> None:
    work, left = Unanswered(GenerationRequest([5, 6], 3, Sampling(max_new_tokens=LENGTH), key=0)), [LENGTH] * 3
    ended = [False] * 3
    for number, (sample, count, ends) in enumerate(pieces):
        if number == moved_after:
            work.begin_again(with_parts=True)
            ended = [False] * 3
        if not ended[sample]:
            count = min(count, left[sample])
            work.take(Delta(sample, [1] * count, [0.0] * count, [0] * count, None, "stop" if ends else None), now=0.0)
            left[sample] -= count
            ended[sample] = ends
        unfinished = sum(each for each, end in zip(left, ended, strict=True) if not end)
        assert work.outstanding == unfinished + (2 if unfinished else 0)
        assert work.answered == all(ended)
