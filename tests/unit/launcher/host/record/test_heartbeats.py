"""Ranks are judged by the progress that one clock has seen, whatever the clocks of their nodes say."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.host.record.heartbeats import HangWatch
from megatron_rl.contract.attempt_records import Hang, Heartbeat
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import write

LIMIT, EVERY, BEGAN = 1800.0, 10.0, 1_000_000.0
HOUR = 3600.0


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    attempt = RunDir(tmp_path).attempt(1)
    attempt.heartbeats.mkdir(parents=True)
    return attempt


def watch(attempt: Attempt, skew: float, seconds: float, stops_after: float) -> Hang | None:
    """The first that is held to hang while two ranks are watched for so long, the second on a node whose clock is
    `skew` seconds ahead; its work stops after a while and its heartbeats go on, and the first rank waits for it."""
    hangs = HangWatch(attempt, LIMIT)
    for after in range(0, int(seconds), int(EVERY)):
        now = BEGAN + after
        got_on = BEGAN + min(after, stops_after)
        beats = (
            Heartbeat(0, 2, "n0", "train", 7, 9, got_on, now, EVERY),
            Heartbeat(1, 2, "n1", "train", 7, 8, got_on + skew, now + skew, EVERY),
        )
        for beat in beats:
            write(attempt.heartbeat(beat.rank), beat)
        if (found := hangs.poll(now)) is not None:
            return found
    return None


@pytest.mark.parametrize("skew", [-24 * HOUR, -HOUR, HOUR, 24 * HOUR])
def test_a_node_whose_clock_is_wrong_does_not_hang(attempt: Attempt, skew: float) -> None:
    assert watch(attempt, skew, seconds=400.0, stops_after=400.0) is None


@pytest.mark.parametrize("skew", [-HOUR, 0.0, HOUR])
def test_a_rank_that_hangs_there_is_found_as_soon_as_anywhere(attempt: Attempt, skew: float) -> None:
    found = watch(attempt, skew, seconds=3000.0, stops_after=600.0)
    assert found is not None
    assert (found.rank, found.host) == (1, "n1")
    assert LIMIT < found.silent_s <= LIMIT + 2 * EVERY


def test_time_in_which_the_watch_itself_stood_still_is_held_against_nobody(attempt: Attempt) -> None:
    """Slurm suspends a job for hours, watch and ranks alike, and on its return a rank still saves."""
    hangs = HangWatch(attempt, LIMIT)

    def poll(now: float) -> Hang | None:
        write(attempt.heartbeat(0), Heartbeat(0, 1, "n0", "save", 7, 9, BEGAN, now, EVERY))
        return hangs.poll(now)

    woke = BEGAN + 3 * HOUR
    assert not any(map(poll, (BEGAN, BEGAN + EVERY)))
    assert not any(poll(woke + after) for after in range(0, int(LIMIT), int(EVERY)))
    found = poll(woke + LIMIT + EVERY)
    assert found is not None
    assert found.silent_s == LIMIT + EVERY
