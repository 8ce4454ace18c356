"""Ranks are judged by the progress that one clock has seen, whatever the clocks of their nodes say."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from launcher.host.judge.hang import silent_rank
from launcher.host.record import heartbeats
from launcher.host.record.heartbeats import HangWatch
from megatron_rl.contract.attempt_records import Hang, Heartbeat
from megatron_rl.contract.codes import HEARTBEAT_LEFT, HEARTBEAT_WAIT
from megatron_rl.contract.heartbeat_files import read_heartbeat, write_heartbeat
from megatron_rl.contract.paths import Attempt, RunDir

REAL_BEGIN_LOOK = heartbeats.begin_look
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
            write_heartbeat(attempt.heartbeats, beat)
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
        write_heartbeat(attempt.heartbeats, Heartbeat(0, 1, "n0", "save", 7, 9, BEGAN, now, EVERY))
        return hangs.poll(now)

    woke = BEGAN + 3 * HOUR
    assert not any(map(poll, (BEGAN, BEGAN + EVERY)))
    assert not any(poll(woke + after) for after in range(0, int(LIMIT), int(EVERY)))
    found = poll(woke + LIMIT + EVERY)
    assert found is not None
    assert found.silent_s == LIMIT + EVERY


@given(st.data())
def test_a_look_judges_as_if_it_had_decoded_the_heartbeats_of_all_ranks(data: st.DataObject) -> None:
    """`poll` decodes them only where it is not certain that all is well."""
    with tempfile.TemporaryDirectory() as folder:
        attempt = RunDir(folder).attempt(1)
        hangs = HangWatch(attempt, LIMIT)
        ranks, now = data.draw(st.integers(1, 4)), BEGAN
        newest: dict[int, Heartbeat] = {}
        for after in data.draw(st.lists(st.sampled_from([10.0, 400.0, 800.0]), min_size=1, max_size=8)):
            for rank in data.draw(st.sets(st.integers(0, ranks - 1))):
                idle = data.draw(st.sampled_from([0.0, 1700.0, 1900.0]))
                phase = data.draw(st.sampled_from(["train", HEARTBEAT_WAIT, HEARTBEAT_LEFT]))
                newest[rank] = Heartbeat(rank, ranks, "n0", phase, 7, 7, now - idle, now, EVERY)
                write_heartbeat(attempt.heartbeats, newest[rank], local_rank=rank)
            found, expected = hangs.poll(now), silent_rank(sorted(newest.values()), BEGAN, now, LIMIT)
            assert (found and found._replace(at=0.0)) == (expected and expected._replace(at=0.0))
            now += after


def test_a_rank_that_hangs_hides_no_other_of_its_node(attempt: Attempt) -> None:
    def beat(rank: int, now: float) -> None:
        write_heartbeat(attempt.heartbeats, Heartbeat(rank, 3, "n0", "train", 7, 8, now, now, EVERY), local_rank=rank)

    hangs = HangWatch(attempt, LIMIT)
    for after in range(0, int(LIMIT) + 30, int(EVERY)):
        for rank in (0, 1, 2) if after == 0 else (1, 2):  # the first rank of the node stops at once
            beat(rank, BEGAN + after)
        found = hangs.poll(BEGAN + after)
    assert [file.name for file in attempt.heartbeats.iterdir()] == ["0.beats"]
    assert found is not None
    assert found.rank == 0


def test_a_half_written_slot_counts_as_the_one_before_it(attempt: Attempt) -> None:
    hangs = HangWatch(attempt, LIMIT)
    write_heartbeat(attempt.heartbeats, Heartbeat(0, 1, "n0", "train", 7, 8, BEGAN, BEGAN, EVERY))
    assert hangs.poll(BEGAN) is None
    file = attempt.heartbeats / "0.beats"
    file.write_bytes(file.read_bytes().replace(b'"step": 7', b'"step": 8'))
    assert hangs.poll(BEGAN + EVERY) is None
    assert [(beat.step, beat.written) for beat in hangs.newest] == [(7, BEGAN)]
    assert read_heartbeat(attempt.heartbeats, 0) is None


def test_a_file_system_that_does_not_answer_keeps_no_poll_waiting(attempt: Attempt, monkeypatch: Any) -> None:
    answer = threading.Event()
    monkeypatch.setattr(heartbeats, "begin_look", REAL_BEGIN_LOOK)
    monkeypatch.setattr(heartbeats, "read_slots", lambda folder: answer.wait(60.0) and {})
    hangs = HangWatch(attempt, LIMIT)
    assert hangs.poll(BEGAN) is None
    assert hangs.poll(BEGAN + LIMIT / 3) is None, "the look has not ended, and no other one begins"
    answer.set()
    until(lambda: hangs.poll(BEGAN + LIMIT / 3) is None and not hangs.looking, "the look has ended")
