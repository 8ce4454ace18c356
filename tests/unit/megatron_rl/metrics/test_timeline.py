"""Every second of a rank is counted once, in one category."""

from __future__ import annotations

import pytest

from megatron_rl.contract.attempt_records import TimelineLine
from megatron_rl.metrics import timeline as module
from megatron_rl.metrics.tally import Tally
from megatron_rl.metrics.timeline import CATEGORIES, Timeline


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock that measures; the wall clock stands still."""
    now = [50.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module.time, "time", lambda: 1000.0)
    return now


def line(timeline: Timeline, step: int = 1) -> TimelineLine:
    """Of two ranks that are alike."""
    tally = Tally()
    timeline.tally(tally)
    return timeline.line({name: 2 * float(value) for name, value in tally._values.items()}, ranks=2, step=step)


def test_an_inner_phase_has_its_seconds_and_the_outer_one_goes_on(clock: list[float]) -> None:
    timeline = Timeline()
    clock[0] += 1
    with timeline.phase("train"):
        clock[0] += 2
        with timeline.phase("wait"):
            clock[0] += 4
        clock[0] += 8
    clock[0] += 16
    told = line(timeline)
    assert told.seconds == {"start-up": 34, "train": 20, "wait": 8}
    assert (told.began, told.at, told.ranks, told.step) == (1000, 1031, 2, 1)


def test_the_seconds_of_a_line_are_those_since_the_line_before(clock: list[float]) -> None:
    timeline = Timeline()
    before = 1000.0
    for number in range(1, 6):
        with timeline.phase("generate"):
            clock[0] += 0.1 * number
        clock[0] += 0.3
        told = line(timeline, number)
        assert sum(told.seconds.values()) == pytest.approx(2 * (told.at - before), abs=1e-9)
        assert (told.began is not None) is (number == 1)
        before = told.at


def test_an_error_ends_a_phase(clock: list[float]) -> None:
    timeline = Timeline()
    with pytest.raises(RuntimeError), timeline.phase("train"):
        clock[0] += 1
        raise RuntimeError
    clock[0] += 2
    assert line(timeline).seconds == {"start-up": 4, "train": 2}


def test_no_more_is_moved_than_there_is(clock: list[float]) -> None:
    timeline = Timeline()
    with timeline.phase("generate"):
        clock[0] += 3
    timeline.move("generate", "reward", 1.0)
    timeline.move("generate", "wait", 99.0)
    assert line(timeline).seconds == {"reward": 2, "wait": 4}


def test_the_names_are_those_of_the_record() -> None:
    assert len(set(CATEGORIES)) == len(CATEGORIES)
    with pytest.raises(KeyError), Timeline().phase("sleeping"):
        pass
