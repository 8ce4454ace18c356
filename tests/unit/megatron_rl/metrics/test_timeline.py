"""Every second of a rank is counted once, in one category."""

from __future__ import annotations

import pytest

from megatron_rl.contract.attempt_records import TimelineLine
from megatron_rl.metrics import timeline as module
from megatron_rl.metrics.stats import Tally
from megatron_rl.metrics.timeline import CATEGORIES, Timeline


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
    return timeline.line({name: 2 * float(value) for name, value in tally._values.items()}, ranks=2, step=step)


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
