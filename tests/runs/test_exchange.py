"""Groups reach all ranks of the replica that trains on them, exactly once and bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_helpers import run_ranks
from core_helpers import random_groups, tiny_run

from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.learn.rollout import exchange as exchange_module
from megatron_rl.learn.rollout.exchange import exchange, group_costs
from megatron_rl.rank.groups import gathered

CONFIG = tiny_run(grpo={"prompts_per_step": 12, "group_size": 4})
RANKS = 4

# Layout -> (training replica of each rank, ranks that are drivers).
LAYOUTS: dict[str, tuple[list[int], list[int]]] = {
    "each rank a replica and a driver": ([0, 1, 2, 3], [0, 1, 2, 3]),
    "replicas of two ranks, a driver each": ([0, 0, 1, 1], [0, 2]),
    "replicas of two ranks, every rank a driver": ([0, 0, 1, 1], [0, 1, 2, 3]),
    "replicas of two ranks far apart": ([0, 1, 0, 1], [1, 2]),
    "one replica, two drivers": ([0, 0, 0, 0], [0, 2]),
    "no driver in one replica": ([0, 0, 1, 1], [1]),
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


def exchanged(rank: int, ranks: int) -> dict[str, Any]:
    """Groups that this rank's driver made, groups it trains on, and bytes it sent, for each layout."""
    exchange_module.NEGLIGIBLE_FLOPS = 0.0
    assert dist.group.WORLD is not None
    found = {}
    for name, (replica_of, drivers) in LAYOUTS.items():
        # Ranks at the same position in their replicas are the data-parallel group of one part of the model.
        place = replica_of[:rank].count(replica_of[rank])
        data = None
        for other in range(replica_of.count(0)):
            peers = [r for r in range(ranks) if replica_of[:r].count(replica_of[r]) == other]
            group = dist.new_group(sorted(peers, key=replica_of.__getitem__))
            data = group if other == place else data
        groups: Any = SimpleNamespace(control=dist.group.WORLD, data=data)
        made = made_by(rank, drivers) if rank in drivers else {}
        with counted() as sent:
            found[name] = (made, exchange(made, CONFIG, groups, problem, partial(gathered, group=groups.control)), sent)
    return found


@contextmanager
def counted() -> Iterator[Counter[int]]:
    sent = Counter[int]()
    isend = dist.isend

    def counting(buffer: torch.Tensor, to: int, **options: Any) -> Any:
        sent[to] += len(buffer)
        return isend(buffer, to, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", counting)
        yield sent


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(tmp_path_factory.mktemp("ranks"), RANKS, exchanged)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_group_is_unchanged_on_all_ranks_of_one_replica(name: str, on_four_ranks: Any) -> None:
    replica_of, drivers = LAYOUTS[name]
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


def test_single_rank_sends_nothing_and_keeps_all_groups(groups: Any) -> None:
    made = made_by(0, [0])
    with counted() as sent:
        assert exchange(made, CONFIG, groups, problem, partial(gathered, group=groups.control)) == made
    assert not sent


def lose_a_rank(rank: int, ranks: int) -> str:
    exchange_module.NEGLIGIBLE_FLOPS = 0.0
    exchange_module._deliver = _leave if rank == 0 else exchange_module._deliver
    groups: Any = SimpleNamespace(control=dist.group.WORLD, data=dist.group.WORLD)
    try:
        exchange(made_by(rank, [0, 1]), CONFIG, groups, problem, partial(gathered, group=groups.control))
    except RuntimeError as error:
        return " ".join(getattr(error, "__notes__", []))
    return ""


def _leave(*_: Any) -> dict[int, bytes]:
    dist.destroy_process_group()
    raise RuntimeError("gone")


def test_rank_that_waits_for_a_lost_rank_names_it(tmp_path: Path) -> None:
    _, waiting = run_ranks(tmp_path, 2, lose_a_rank)
    assert waiting.startswith("during the exchange of the step's groups, ")
    assert waiting.endswith(" rank 0")
