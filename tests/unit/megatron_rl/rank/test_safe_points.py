"""Safe points and phases: signs of life, and the ranks' agreement to leave."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import quiet_safe_points

from megatron_rl.contract.attempt_records import Drain
from megatron_rl.contract.codes import HEARTBEAT_WAIT, MARGIN_S, SIGNALLED
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import if_readable, read, write
from megatron_rl.rank import drain as drain_module
from megatron_rl.rank import safe_points as safe_points_module
from megatron_rl.rank.drain import FIT, DrainListener, fits
from megatron_rl.rank.safe_points import PHASES, LeaveAgreed


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    attempt = RunDir(tmp_path).attempt(1)
    attempt.folder.mkdir(parents=True)
    return attempt


@pytest.mark.parametrize(
    ("left_s", "seconds", "fit"),
    [(None, 1e9, True), (MARGIN_S + FIT * 10, 10.0, True), (MARGIN_S + FIT * 10 - 1, 10.0, False), (0.0, 0.0, False)],
)
def test_a_save_must_fit_one_and_a_half_times_into_the_remaining_time(
    left_s: float | None, seconds: float, fit: bool
) -> None:
    assert fits(left_s, seconds) is fit


def test_a_rank_without_a_world_leaves_when_asked() -> None:
    safe_points = quiet_safe_points()
    safe_points.agree()
    safe_points.drain.asked = True
    with pytest.raises(LeaveAgreed):
        safe_points.agree()


def test_taking_the_maximum_is_a_safe_point_and_no_progress(groups: Any) -> None:
    safe_points = quiet_safe_points()
    safe_points.connect(groups)
    numbers, beat = torch.tensor([3, 0]), safe_points.activity.last_beat
    assert safe_points.maximum(numbers).tolist() == [3, 0]
    assert safe_points.activity.last_beat == beat
    safe_points.drain.asked = True
    with pytest.raises(LeaveAgreed):
        safe_points.maximum(numbers)


def test_all_ranks_leave_if_one_was_asked(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the others would wait for the one that left in their next collective."""
    safe_points = quiet_safe_points()
    safe_points.connect(groups)
    monkeypatch.setattr(groups.control, "any", lambda *own: [True, True])
    with pytest.raises(LeaveAgreed):
        safe_points.agree()
    assert safe_points.drain.asked


@pytest.mark.parametrize(
    ("rank", "said"), [(0, (True, True)), (3, (True, False))], ids=["the first one", "another one"]
)
def test_rank_0s_clock_decides_whether_there_is_time_to_finish(
    rank: int, said: tuple[bool, ...], groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts' clocks may differ, and one that is ahead would make all ranks leave too early."""
    safe_points = quiet_safe_points()
    safe_points.connect(groups)
    flags: list[tuple[bool, ...]] = []

    def any_of(*mine: bool) -> list[bool]:
        flags.append(mine)
        return [False, False]

    monkeypatch.setattr(groups.control, "rank", rank)
    monkeypatch.setattr(groups.control, "any", any_of)
    monkeypatch.setattr(safe_points.drain, "left_s", lambda: 10.0)
    safe_points.drain.asked = True
    safe_points.agree(unfinished_s=3600.0)
    safe_points.agree(unfinished_s=0.1)
    assert flags == [said, (True, False)]


def test_after_an_error_the_heartbeat_names_the_innermost_phase() -> None:
    safe_points = quiet_safe_points()
    safe_points.activity.enter("training", 3)
    with safe_points.phase("train"):
        pass
    assert safe_points.activity.doing == "training"
    with pytest.raises(RuntimeError), safe_points.phase("evaluate"), safe_points.phase("wait"):
        raise RuntimeError
    assert safe_points.activity.doing == PHASES["wait"]


def test_a_following_rank_reports_that_it_waits_within_the_same_phase() -> None:
    """launcher.host.judge.hang then finds that the rank it waits for is behind."""
    activity = quiet_safe_points().activity
    activity.begin("generating")
    entered, began = activity.entered, activity.last_beat
    with activity.waits():
        assert activity.doing == HEARTBEAT_WAIT
        assert activity.last_beat == began
    assert (activity.doing, activity.entered) == ("generating", entered)
    assert activity.last_beat > began


@pytest.mark.parametrize("progresses", [True, False])
def test_waiting_is_no_sign_of_life(progresses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that never arrives must show as silence."""
    safe_points = quiet_safe_points()
    beats: list[float] = []
    monkeypatch.setattr(safe_points.activity, "beat", lambda: beats.append(time.monotonic()))
    monkeypatch.setattr(safe_points_module, "POLL_S", 0.02)

    async def work() -> str:
        await asyncio.sleep(0.15)
        while progresses and len(beats) < 4:  # a busy machine polls late
            await asyncio.sleep(0.02)
        return "done"

    waiting = safe_points.run_until_asked(work(), time.monotonic if progresses else lambda: 0)
    assert asyncio.run(waiting) == "done"
    assert len(beats) > 3 if progresses else len(beats) == 1


def test_work_is_cancelled_soon_after_the_request() -> None:
    safe_points = quiet_safe_points()
    cancelled = []

    async def work() -> Any:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def main() -> Any:
        asyncio.get_running_loop().call_later(0.02, setattr, safe_points.drain, "asked", True)
        return await safe_points.run_until_asked(work(), lambda: 0)

    assert asyncio.run(main()) is None
    assert cancelled == [True]


@pytest.mark.parametrize(
    "text", ['{"cause": "preempted", "by": "Slurm", "at": 1.0}', '{"deadline": "soon"}', "[1]", ""]
)
def test_an_unreadable_request_has_no_deadline(text: str, attempt: Attempt) -> None:
    attempt.drain.write_text(text, encoding="utf-8")
    assert DrainListener(attempt).left_s() is None


@pytest.mark.parametrize("jump", [-18000.0, 18000.0])
def test_a_clock_that_is_set_does_not_move_the_deadline_of_the_ranks(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    now = time.time()
    write(attempt.drain, Drain("preempted", "Slurm", now, deadline=now + 600.0))
    drain = DrainListener(attempt)
    first_s = drain.left_s()
    monkeypatch.setattr(drain._steady, "_wall", lambda: now + jump)
    left_s = drain.left_s()
    assert first_s is not None and left_s is not None
    assert 0.0 < left_s <= first_s <= 600.0


def test_ranks_asked_alone_notify_the_host_side_and_keep_an_existing_request(attempt: Attempt) -> None:
    DrainListener(attempt).notify_host(rank=0)
    written = if_readable(read(Drain, attempt.drain))
    assert written is not None
    assert (written.cause, written.by, written.deadline) == (SIGNALLED, "a request to rank 0", None)
    request = Drain("preempted", "Slurm", 1.0, deadline=21.0)
    write(attempt.drain, request)
    DrainListener(attempt).notify_host(rank=0)
    assert read(Drain, attempt.drain) == request


def test_a_full_disk_at_the_request_ends_no_rank(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(drain_module, "write", full)
    DrainListener(attempt).notify_host(rank=0)
    assert "the host side cannot be notified" in caplog.text
