"""A hang names the rank that the others wait for, and a run that makes progress is left alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.host.judge.hang import absent_rank, by_clock_of_reader, silent_rank, suspects
from megatron_rl.contract.attempt_records import Hang, Heartbeat
from megatron_rl.contract.codes import HEARTBEAT_LEFT, HEARTBEAT_WAIT

NOW = 100_000.0
LIMIT = 1800.0
BEGAN = NOW - 50_000


def beat(rank: int, silent: float, step: int = 41, phase: str = "train", **changes: float) -> Heartbeat:
    """Heartbeat of one of four ranks, whose main thread made progress `silent` seconds ago and whose heartbeat is
    fresh."""
    fresh = Heartbeat(rank, 4, f"node{rank:02}", phase, step, step, at=NOW - silent, written=NOW - 3, every=10.0)
    return fresh._replace(**changes)


def hung(*beats: Heartbeat, now: float = NOW, limit: float = LIMIT) -> Hang | None:
    return silent_rank(beats, BEGAN, now, limit)


def test_ranks_that_get_on_do_not_hang():
    assert hung(*(beat(rank, 20) for rank in range(4))) is None


def test_the_one_that_is_a_step_behind_is_named():
    others = [beat(rank, 1810, step=42) for rank in (0, 1, 2)]
    assert hung(*others, beat(3, 1805, phase="generate")) == Hang(3, "node03", "generate", 41, 1805.0, NOW)


def test_the_one_that_is_a_phase_behind_is_named():
    others = [beat(rank, 1900, entered=9) for rank in (0, 1, 2)]
    assert hung(*others, beat(3, 1850, phase="generate", entered=8)).rank == 3


def test_a_rank_that_says_it_waits_is_not_what_the_others_wait_for():
    others = [beat(rank, 1900, phase=HEARTBEAT_WAIT) for rank in (0, 1, 2)]
    assert hung(*others, beat(3, 1850, phase="generate")).rank == 3


def test_in_the_same_place_the_one_that_stopped_first_is_named():
    assert hung(beat(0, 1900), beat(1, 1905), beat(2, 1901), beat(3, 1900)).rank == 1


def test_as_long_as_one_gets_on_the_others_may_be_waiting_for_it():
    assert hung(*(beat(rank, 2000, phase=HEARTBEAT_WAIT) for rank in (0, 1, 2)), beat(3, 5, phase="generate")) is None
    assert hung(*(beat(rank, 2000) for rank in (0, 1, 2)), beat(3, 5)) is None


def test_a_process_that_is_stopped_is_named_although_another_one_is_behind():
    stopped = beat(2, 1900, step=42, written=NOW - 1890)
    assert hung(beat(0, 1850), beat(1, 1850), stopped, beat(3, 1850)).rank == 2


def test_so_is_one_that_was_stopped_shortly_after_it_last_got_on():
    stopped = beat(2, 1802, written=NOW - 1799)
    assert hung(beat(0, 1810), beat(1, 1815), stopped, beat(3, 1805)).rank == 2


def test_a_rank_that_never_came_is_named():
    assert hung(*(beat(rank, 20, step=0) for rank in (0, 1, 2))) == Hang(3, None, "starting", 0, NOW - BEGAN, NOW)


def test_ranks_none_of_which_came_hang_once_the_limit_is_over():
    assert silent_rank([], NOW - 1801, NOW, LIMIT).rank == 0
    assert silent_rank([], NOW - 1799, NOW, LIMIT) is None


def test_a_rank_that_may_still_be_on_its_way_is_waited_for_however_low_the_limit():
    others = [beat(rank, 200, step=0, written=NOW) for rank in (0, 1, 2)]
    assert silent_rank(others, NOW - 300, NOW, limit=100) is None
    assert silent_rank(others, NOW - 601, NOW, limit=100).rank == 3


def test_a_rank_that_left_is_not_missed():
    left = beat(2, 5000, phase=HEARTBEAT_LEFT, written=NOW - 5000)
    assert hung(beat(0, 20), beat(1, 20), left, beat(3, 20)) is None
    assert hung(*(left._replace(rank=rank) for rank in range(4))) is None


HEARTBEATS = st.lists(
    st.builds(
        beat,
        rank=st.integers(0, 7),
        silent=st.floats(0, 4000),
        step=st.integers(0, 3),
        phase=st.sampled_from(["train", HEARTBEAT_WAIT, HEARTBEAT_LEFT]),
        ranks=st.integers(1, 8),
        entered=st.integers(0, 3),
    ),
    unique_by=lambda beat: beat.rank,
)


@given(HEARTBEATS)
def test_whoever_is_named_was_silent_for_longer_than_the_limit(beats):
    found = hung(*beats)
    if found is not None:
        assert found.silent_s >= LIMIT
        assert found.phase != HEARTBEAT_LEFT


@given(HEARTBEATS, st.floats(0, 5000))
def test_silence_never_ends_by_waiting_for_longer(beats, seconds):
    if hung(*beats) is not None:
        assert hung(*beats, now=NOW + seconds) is not None


@given(HEARTBEATS, st.randoms())
def test_the_order_in_which_heartbeats_are_read_does_not_matter(beats, random):
    shuffled = random.sample(beats, len(beats))
    assert (hung(*beats) is None) == (hung(*shuffled) is None)


def test_of_a_collective_that_timed_out_the_rank_is_accused_that_did_not_come():
    beats = [*(beat(rank, 600, phase=HEARTBEAT_WAIT) for rank in (0, 1, 2)), beat(3, 700, phase="generate")]
    assert absent_rank(beats, {0}) == Hang(3, "node03", "generate", 41, 697.0, NOW - 3)


def test_a_stopped_process_is_accused_of_it():
    beats = [beat(0, 600), beat(1, 590), beat(2, 603, written=NOW - 601), beat(3, 600)]
    assert absent_rank(beats, {0}).rank == 2


def test_nobody_is_accused_where_nobody_stands_out():
    waiting = [beat(rank, 600, phase=HEARTBEAT_WAIT) for rank in range(4)]
    assert absent_rank(waiting, {0, 1, 2, 3}) is None
    assert absent_rank([beat(0, 600), *(beat(rank, 590) for rank in (1, 2, 3))], {0}) is None
    assert absent_rank([], {0}) is None


def test_a_rank_that_never_came_is_absent_rank():
    assert absent_rank([beat(rank, 600, step=0) for rank in (0, 1, 2)], {0, 1}).rank == 3


@given(HEARTBEATS, st.floats(-1e6, 1e6))
def test_a_clock_that_is_wrong_on_some_node_changes_nothing(beats, hours):
    wrong = [
        by_clock_of_reader(one._replace(at=one.at + hours, written=one.written + hours), first_seen=one.written)
        for one in beats
    ]
    assert [(one.rank, round(one.at, 3), one.written) for one in wrong] == [
        (one.rank, round(one.at, 3), one.written) for one in beats
    ]


def test_one_that_waited_and_has_ended_over_it_is_not_the_one_that_did_not_come():
    """A rank whose collective timed out reports it and is gone, and sends no heartbeats any more."""
    gone = beat(0, 700, phase=HEARTBEAT_WAIT, written=NOW - 90)
    others = [*(beat(rank, 600, phase=HEARTBEAT_WAIT) for rank in (1, 2)), beat(3, 800, phase="generate")]
    assert absent_rank([gone, *others], {0}).rank == 3


@given(HEARTBEATS, st.sets(st.integers(0, 7)), st.integers(1, 8))
def test_to_know_who_waits_among_the_first_suspects_suffices_to_accuse_one_of_them(beats, waiting, known):
    suspected = [one.rank for one in suspects(beats)[:known]]
    accused = absent_rank(beats, waiting)
    of_those_known = absent_rank(beats, waiting & {*suspected})
    if accused is not None and accused.rank in suspected:
        assert of_those_known == accused


def test_nobody_is_accused_where_one_that_waited_was_itself_as_far_behind():
    beats = [beat(0, 600, entered=9), beat(1, 600, entered=7), beat(2, 600, entered=8), beat(3, 600, entered=9)]
    assert absent_rank(beats, {0, 1}) is None
    assert absent_rank(beats, {0, 3}).rank == 1
