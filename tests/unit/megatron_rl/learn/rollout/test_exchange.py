"""Groups reach all ranks of the replica that trains on them, exactly once and bit for bit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from core_helpers import random_groups, tiny_run
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import on_threads

from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.learn.rollout import exchange as exchange_module
from megatron_rl.learn.rollout.exchange import GroupRoutes, Offers, _routes, exchange, group_costs
from megatron_rl.rank.control import Control
from megatron_rl.rank.groups import TrainingReplicas
from megatron_rl.rank.peers import PeerLost

CONFIG = tiny_run(grpo={"prompts_per_step": 12, "group_size": 4})
RANKS = 4

# Layout -> (ranks of a replica that follow one another, replicas, ranks that are drivers).
LAYOUTS: dict[str, tuple[int, int, list[int]]] = {
    "each rank a replica and a driver": (1, 4, [0, 1, 2, 3]),
    "replicas of two ranks, a driver each": (2, 2, [0, 2]),
    "replicas of two ranks, every rank a driver": (2, 2, [0, 1, 2, 3]),
    "replicas of two ranks far apart": (1, 2, [1, 2]),
    "one replica, two drivers": (4, 1, [0, 2]),
    "no driver in one replica": (2, 2, [1]),
}


def problem(ordinal: int) -> Problem:
    return Problem(f"number {ordinal}", {"answer": ordinal})


def as_sampled(one: Trajectory) -> Trajectory:
    """Round the log-probs to fp32, as engines report them."""
    return replace(one, logprobs=torch.tensor(one.logprobs).tolist())


def made_by(driver: int, drivers: list[int]) -> dict[int, TrajectoryGroup]:
    """Groups of a driver by position. Later drivers have longer answers; one group of each has no gradient."""
    made = {}
    for position in range(drivers.index(driver), CONFIG.grpo.prompts_per_step, len(drivers)):
        (group,) = random_groups(1, 4, seed=position, longest=5 + 9 * driver)
        if position < len(drivers):
            group = replace(group, trajectories=[replace(each, reward=0.5) for each in group.trajectories])
        group = replace(group, trajectories=[as_sampled(each) for each in group.trajectories])
        made[position] = replace(group, ordinal=100 + position, problem=problem(100 + position), failures={"x": 1})
    return made


def exchanged(control: Control) -> dict[str, Any]:
    """Groups that this rank's driver made, groups it trains on, and bytes it sent, for each layout."""
    found = {}
    for name, (neighbours, replicas, drivers) in LAYOUTS.items():
        groups: Any = SimpleNamespace(control=control, replicas=TrainingReplicas(neighbours, replicas, RANKS))
        made = made_by(control.rank, drivers) if control.rank in drivers else {}
        with counted(control) as sent:
            found[name] = made, exchange(made, CONFIG, groups, problem), sent
    return found


@contextmanager
def counted(control: Control) -> Iterator[Counter[int]]:
    """Count the bytes that a rank sends to each other rank."""
    sent = Counter[int]()
    send = control.exchange

    def counting(outgoing: Any, incoming: Any) -> Any:
        for rank, messages in outgoing.items():
            sent[rank] += sum(map(len, messages))
        return send(outgoing, incoming)

    with mock.patch.object(control, "exchange", counting):
        yield sent


@pytest.fixture(scope="module")
def on_four_ranks() -> list[dict[str, Any]]:
    with mock.patch.object(exchange_module, "NEGLIGIBLE_FLOPS", 0.0):
        return on_threads(RANKS, exchanged)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_group_is_unchanged_on_all_ranks_of_one_replica(name: str, on_four_ranks: Any) -> None:
    neighbours, replicas, drivers = LAYOUTS[name]
    replica_of = map(TrainingReplicas(neighbours, replicas, RANKS).of, range(RANKS))
    made = {position: group for driver in drivers for position, group in made_by(driver, drivers).items()}
    by_replica: dict[int, dict[int, TrajectoryGroup]] = {}
    for replica, found in zip(replica_of, on_four_ranks, strict=True):
        here = found[name][1]
        assert here == by_replica.setdefault(replica, here), "all ranks of a replica must have the same groups"
        assert here == {position: made[position] for position in sorted(here)}
        assert [*here] == sorted(here)
    assert sorted(position for here in by_replica.values() for position in here) == sorted(made)


def test_replicas_have_similar_amounts_of_work(on_four_ranks: Any) -> None:
    """The last driver's answers are several times as long as the first one's."""
    name = "each rank a replica and a driver"
    before, after = (
        [sum(group_costs([*found[name][index].values()], CONFIG)) for found in on_four_ranks] for index in (0, 1)
    )
    assert max(before) > 1.3 * sum(before) / RANKS
    assert max(after) < 1.2 * sum(after) / RANKS


def test_groups_without_gradient_are_not_sent(on_four_ranks: Any) -> None:
    name = "each rank a replica and a driver"
    for rank, found in enumerate(on_four_ranks):
        assert rank in found[name][1]


def test_group_is_sent_to_another_replica_once(on_four_ranks: Any) -> None:
    """The receiving rank forwards it within its replica, so a slow link carries each group once."""
    name = "no driver in one replica"
    sent = [found[name][2] for found in on_four_ranks]
    assert [{*each} for each in sent] == [set(), {0, 2}, {3}, set()]
    assert sent[1][2] == sent[2][3] > 0


def test_single_rank_sends_nothing_and_keeps_all_groups() -> None:
    made, control = made_by(0, [0]), Control(0, 1)
    with counted(control) as sent:
        groups: Any = SimpleNamespace(control=control, replicas=TrainingReplicas(1, 1, 1))
        assert exchange(made, CONFIG, groups, problem) == made
    assert not sent


def test_an_error_says_that_it_was_during_the_exchange() -> None:
    control: Any = SimpleNamespace(exchange=mock.Mock(side_effect=PeerLost("rank 1 closed its connection")))
    with pytest.raises(PeerLost) as raised:
        exchange_module._send_along([GroupRoutes.empty()], {}, control, problem)
    assert raised.value.__notes__ == ["during the exchange of the step's groups"]


@given(st.data())
def test_the_routes_of_the_ranks_are_those_of_the_world(data: st.DataObject) -> None:
    ranks = TrainingReplicas(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), 18)
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 17), st.integers(0, ranks.count - 1)), max_size=8))
    drivers, assigned = [driver for driver, _ in pairs], [replica for _, replica in pairs]
    between, within = world_routes(drivers, [ranks.members(replica) for replica in assigned])
    homes = [ranks.of(driver) for driver in drivers]
    offers = Offers(range(len(drivers)), drivers, [1.0] * len(drivers))
    for rank in range(18):
        for found, routes in zip(_routes(offers, homes, assigned, ranks, rank), (between, within), strict=True):
            assert dict(found.outgoing) == {to: its for (source, to), its in routes.items() if source == rank}
            assert dict(found.incoming) == {source: its for (source, to), its in routes.items() if to == rank}


def world_routes(drivers: list[int], trained_on: list[list[int]]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """(source, destination) -> positions, between replicas and then within them."""
    between: dict[tuple[int, int], list[int]] = defaultdict(list)
    within: dict[tuple[int, int], list[int]] = defaultdict(list)
    for position, (driver, ranks) in enumerate(zip(drivers, trained_on, strict=True)):
        holder = driver
        if holder not in ranks:
            holder = ranks[0]
            between[driver, holder].append(position)
        for rank in ranks:
            if rank != holder:
                within[holder, rank].append(position)
    return between, within
