"""Steps after which a run is saved: fixed, permanent, last, and `save.every: auto`."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.checkpoint.save_schedule import SaveSchedule
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart
from megatron_rl.contract.checkpoint_interval import SaveCost
from megatron_rl.contract.codes import LOST
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append
from megatron_rl.rank.control import Control
from megatron_rl.recipe.save_section import SaveConfig

pytestmark = pytest.mark.usefixtures("one_rank")


def saved_steps(
    folder: Path,
    last: int,
    first: int = 0,
    cost: SaveCost | None = None,
    pace: Any = 10.0,
    then: SaveCost | None = None,
    control: Any = None,
    **save: Any,
) -> list[int]:
    """Steps that a run saves if its steps take `pace` seconds, or `pace(step)`.

    Args:
        cost: of a save, as known at the beginning.
        then: as known from the first save on.
    """
    now = 0.0
    control = control or Control(0, 1)
    saver = SimpleNamespace(run_dir=RunDir(folder), config=SaveConfig(**save), control=control, cost=cost)
    schedule = SaveSchedule(saver, first, last, clock=lambda: now)  # type: ignore[arg-type]
    found = []
    for step in range(first + 1, last + 1):
        now += pace(step) if callable(pace) else pace
        if schedule.due(step):
            found.append(step)
            saver.cost = then or saver.cost
    return found


def test_every_nth_step_and_the_last(tmp_path: Path) -> None:
    assert saved_steps(tmp_path, 10, every=4) == [4, 8, 10]


def test_zero_saves_only_the_last(tmp_path: Path) -> None:
    assert saved_steps(tmp_path, 10, every=0) == [10]


def test_permanent_checkpoints_are_always_made(tmp_path: Path) -> None:
    assert saved_steps(tmp_path, 12, every=4, keep_every=5) == [4, 5, 8, 10, 12]
    assert saved_steps(tmp_path, 12, every=0, keep_every=5) == [5, 10, 12]


def test_auto_saves_the_first_step_to_measure_the_cost_and_then_at_the_optimum(tmp_path: Path) -> None:
    """Young's sqrt(2 * 3 s * 1 day) is 720 s, 72 steps of 10 s."""
    found = saved_steps(tmp_path, 1000, every="auto", then=SaveCost(3.0, 30.0))
    assert found[0] == 1
    assert {72, 73} >= {later - one for one, later in itertools.pairwise(found[:-1])}
    assert len(found) > 12


def test_auto_saves_more_often_if_the_run_fails_more_often(tmp_path: Path) -> None:
    calm = saved_steps(tmp_path, 300, every="auto", then=SaveCost(3.0, 30.0))
    for attempt in range(1, 50):
        append(RunDir(tmp_path).attempts_ledger, AttemptStart(attempt, 1000.0 * attempt))
        append(RunDir(tmp_path).attempts_ledger, AttemptEnd(attempt, 1000.0 * attempt + 900.0, LOST))
    assert len(saved_steps(tmp_path, 300, every="auto", then=SaveCost(3.0, 30.0))) > 3 * len(calm)


def test_auto_follows_steps_that_grow_longer(tmp_path: Path) -> None:
    """Steps grow from 10 s to 40 s: never more than one step beyond the optimum of 720 s."""

    def pace(step: int) -> float:
        return 10.0 + 30.0 * step / 1000

    found = saved_steps(tmp_path, 1000, every="auto", then=SaveCost(3.0, 30.0), pace=pace)
    for one, later in itertools.pairwise(found[:-1]):
        took = sum(map(pace, range(one + 1, later + 1)))
        assert abs(took - 720) <= pace(later)


def test_auto_broadcasts_a_few_times_between_two_saves(tmp_path: Path) -> None:
    broadcasts: list[Any] = []
    found = saved_steps(tmp_path, 1000, control=noting(broadcasts), every="auto", then=SaveCost(3.0, 30.0))
    assert 0 < len(broadcasts) <= (math.log2(72) + 2) * len(found) < 200


def noting(shared: list[Any]) -> Any:
    """Rank 0's control, which notes what it shares."""

    def share(decision: Any) -> Any:
        shared.append(decision)
        return decision

    return SimpleNamespace(rank=0, share=share)


def test_ranks_that_measure_different_times_agree(tmp_path: Path) -> None:
    """Whatever its own clock says, each rank joins the broadcasts at the steps that rank 0 chose."""

    def saved(control: Any) -> list[int]:
        rank = control.rank
        cost = SaveCost(3.0 + 10 * rank, 30.0)
        pace = lambda step: 10.0 + 7.0 * rank * (step % 3)  # noqa: E731
        return saved_steps(tmp_path, 400, control=control, every="auto", then=cost, pace=pace)

    broadcast: list[Any] = []
    first = saved(noting(broadcast))
    decisions = iter(broadcast)
    assert saved(SimpleNamespace(rank=1, share=lambda _: next(decisions))) == first
    assert list(decisions) == []
    assert len(first) > 3
