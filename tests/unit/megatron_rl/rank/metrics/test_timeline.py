"""Every second of a rank is counted once, in one category."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.contract.attempt_records import SlowestRank, TimelineLine
from megatron_rl.rank.control import Control
from megatron_rl.rank.metrics import timeline as module
from megatron_rl.rank.metrics.stats import Reduced, Tally
from megatron_rl.rank.metrics.timeline import CATEGORIES, COMPARED, Timeline, slowest


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Readings of the monotonic clock; the wall clock stands still."""
    now = [50.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module.time, "time", lambda: 1000.0)
    return now


def line(timeline: Timeline, step: int = 1) -> TimelineLine:
    """Line of two identical ranks."""
    tally = Tally()
    timeline.tally(tally)
    total = {name: 2 * float(value) for name, value in tally._values.items()}
    return timeline.line(Reduced(total, 2), step=step)


def test_an_inner_phase_interrupts_the_outer_one(clock: list[float]) -> None:
    timeline = Timeline()
    clock[0] += 1
    with timeline.phase("train"):
        clock[0] += 2
        with timeline.phase("wait"):
            clock[0] += 4
        clock[0] += 8
    clock[0] += 16
    found = line(timeline)
    assert found.seconds == {"start-up": 34, "train": 20, "wait": 8}
    assert (found.began, found.at, found.ranks, found.step) == (1000, 1031, 2, 1)


def test_a_line_has_the_seconds_since_the_previous_line(clock: list[float]) -> None:
    timeline = Timeline()
    before = 1000.0
    for number in range(1, 6):
        with timeline.phase("generate"):
            clock[0] += 0.1 * number
        clock[0] += 0.3
        found = line(timeline, number)
        assert sum(found.seconds.values()) == pytest.approx(2 * (found.at - before), abs=1e-9)
        assert (found.began is not None) is (number == 1)
        before = found.at


def test_an_error_ends_a_phase(clock: list[float]) -> None:
    timeline = Timeline()
    with pytest.raises(RuntimeError), timeline.phase("train"):
        clock[0] += 1
        raise RuntimeError
    clock[0] += 2
    assert line(timeline).seconds == {"start-up": 4, "train": 2}


def test_only_counted_seconds_are_moved(clock: list[float]) -> None:
    timeline = Timeline()
    with timeline.phase("generate"):
        clock[0] += 3
    timeline.move("generate", "reward", 1.0)
    timeline.move("generate", "wait", 99.0)
    assert line(timeline).seconds == {"reward": 2, "wait": 4}


def test_an_unknown_category_is_refused() -> None:
    assert len(set(CATEGORIES)) == len(CATEGORIES)
    with pytest.raises(KeyError), Timeline().phase("sleeping"):
        pass


def test_the_rank_with_most_seconds_of_work_is_slowest_and_with_fewest_of_waiting():
    seconds = torch.tensor([2.0, 2.5, 9.0, 2.1], dtype=torch.float64)
    assert slowest(seconds, "train") == SlowestRank(2, 9.0, 2.1)
    assert slowest(seconds, "wait") == SlowestRank(0, 2.0, 2.5)
    assert slowest(torch.ones(4096), "train") == SlowestRank(0, 1.0, 1.0)
    assert slowest(torch.tensor([3.0, 4.0]), "generate") == SlowestRank(1, 4.0, 3.0)


def test_a_line_of_several_ranks_names_the_slowest_of_every_category_that_tells_it(clock: list[float]) -> None:
    timeline, tally = Timeline(), Tally()
    with timeline.phase("train"):
        clock[0] += 5
    timeline.tally(tally)
    compared = {name: torch.tensor([value] * 3) for name, value in tally._compared.items()}
    compared["train"] = torch.tensor([5.0, 5.0, 7.0])
    total = {name: 3 * float(value) for name, value in tally._values.items()}
    assert timeline.line(Reduced(total, 3, compared), step=1).slowest == {"train": SlowestRank(2, 7.0, 5.0)}
    assert {*compared} == {*COMPARED} < {*CATEGORIES}


def test_a_single_rank_has_no_slowest_one(clock: list[float]) -> None:
    timeline, tally = Timeline(), Tally()
    timeline.tally(tally)
    assert timeline.line(tally.reduce(Control(0, 1)), step=1).slowest is None
