"""Drivers are connected to few of many replicas, and others take over from those that are lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import write
from megatron_rl.generate.replicas import shard
from megatron_rl.generate.replicas.link import ReplicaGone
from megatron_rl.generate.replicas.links import ReplicaLinks, Roster
from megatron_rl.generate.replicas.shard import ENOUGH, Shard
from megatron_rl.generate.replicas.wire import PROTOCOL

REPLICAS = 10


@given(st.integers(1, 300), st.integers(2, 40))
def test_shards_are_bounded_and_each_replica_belongs_to_equally_many(replicas: int, drivers: int) -> None:
    shards = [Shard(driver, drivers).preferred(range(replicas)) for driver in range(drivers)]
    assert shards[0] == ([*range(replicas)], replicas), "driver 0 commands all"
    for order, _ in shards:
        assert sorted(order) == [*range(replicas)], "all others may take over"
    firsts = Counter(order[0] for order, _ in shards)
    assert max(firsts.values()) <= ceil(drivers / replicas), "drivers with one request each ask as many replicas"
    if replicas <= ENOUGH:
        assert all(needed == replicas for _, needed in shards)
        return
    assert all(ENOUGH - 1 <= needed <= ENOUGH + ceil(replicas / drivers) for _, needed in shards[1:])
    # Without the shard that driver 0 would have had, which lies at the beginning:
    members = Counter(number for order, needed in shards[1:] for number in order[:needed])
    members.update(range(replicas * ceil(ENOUGH * drivers / replicas) // drivers))
    assert len(members) == replicas
    assert len(set(members.values())) == 1


class FakeLink:
    def __init__(self, address: ReplicaAddress) -> None:
        self.start = (address.replica, address.start)
        self.outstanding, self.responds = 0, True
        self._end = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        await self._end

    def break_down(self) -> None:
        self._end.set_exception(ReplicaGone(f"replica {self.start} is gone"))


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    attempt = RunDir(tmp_path).attempt(1)
    for number in range(REPLICAS):
        attempt.replica(number).folder.mkdir(parents=True)
        write(attempt.replica(number).listener, ReplicaAddress(number, 0, "127.0.0.1", 9, 1, "", PROTOCOL, 0.0))
    return attempt


def test_replicas_are_found_in_the_order_of_the_shard(attempt: Attempt) -> None:
    found = Roster(attempt, shard=Shard(4, 5)).read()
    assert [address.replica for address in found.addresses] == [8, 9, *range(8)]


def test_others_take_over_from_lost_replicas_until_they_are_back(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "ENOUGH", 3)
    broken: set[int] = set()
    made: list[FakeLink] = []

    def link_to(address: ReplicaAddress) -> FakeLink:
        made.append(FakeLink(address))
        if address.replica in broken:
            made[-1].responds = False
            made[-1].break_down()
        return made[-1]

    async def look(links: ReplicaLinks) -> list[int]:
        assert await links.connect_new() is None
        for _ in range(3):
            await asyncio.sleep(0)
        return sorted(replica for replica, _ in links._links)

    async def drive() -> None:
        spawn: Callable = asyncio.ensure_future
        links = ReplicaLinks(Roster(attempt, shard=Shard(4, 5)), link_to, spawn, lambda link: None)  # type: ignore[arg-type]
        assert await look(links) == [0, 1, 8, 9]
        broken.update((8, 9))
        for number in broken:
            links._links[number, 0].break_down()  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
        assert await look(links) == [0, 1, 2, 3], "8 and 9 are tried, but no longer count"
        assert await look(links) == [0, 1, 2, 3]
        links._links[2, 0].outstanding = 7
        broken.clear()
        assert await look(links) == [0, 1, 2, 3, 8, 9]
        assert await look(links) == [0, 1, 2, 8, 9], "2 has requests"
        links._links[2, 0].outstanding = 0
        assert await look(links) == [0, 1, 8, 9]
        for keeper in links._keepers.values():
            keeper.cancel()

    asyncio.run(drive())
