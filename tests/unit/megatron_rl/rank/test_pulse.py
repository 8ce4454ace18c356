"""What the phases of a rank have in common: signs of life, and how ranks agree to leave."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from core_helpers import quiet_pulse

from megatron_rl.contract.paths import RunDir
from megatron_rl.rank.drain import FIT, MARGIN_S, Drain, fits
from megatron_rl.rank.safe_points import IN_WORDS, Left
from megatron_rl.run_dir import read_json, write_json


@pytest.mark.parametrize(
    ("left_s", "seconds", "fit"),
    [(None, 1e9, True), (MARGIN_S + FIT * 10, 10.0, True), (MARGIN_S + FIT * 10 - 1, 10.0, False), (0.0, 0.0, False)],
)
def test_what_takes_half_as_long_again_must_still_be_done_in_time(
    left_s: float | None, seconds: float, fit: bool
) -> None:
    assert fits(100.0, None if left_s is None else 100.0 + left_s, seconds) is fit


def test_a_rank_on_its_own_leaves_when_it_is_asked_to() -> None:
    pulse = quiet_pulse()
    pulse.agree()
    pulse.drain.asked = True
    with pytest.raises(Left):
        pulse.agree()


def test_a_heartbeat_says_what_failed_and_not_what_was_around_it() -> None:
    pulse = quiet_pulse()
    pulse.progress.enter("training", 3)
    with pulse.phase("train"):
        pass
    assert pulse.progress.doing == "training"
    with pytest.raises(RuntimeError), pulse.phase("evaluate"), pulse.phase("wait"):
        raise RuntimeError
    assert pulse.progress.doing == IN_WORDS["wait"]


@pytest.mark.parametrize("gets_on", [True, False])
def test_merely_waiting_is_no_sign_of_life(gets_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that never comes must show as silence."""
    pulse = quiet_pulse()
    beats: list[float] = []
    monkeypatch.setattr(pulse.progress, "beat", lambda: beats.append(time.monotonic()))
    assert asyncio.run(pulse.attend(asyncio.sleep(0.65, "done"), time.monotonic if gets_on else lambda: 0)) == "done"
    assert len(beats) > 3 if gets_on else len(beats) == 1


def test_work_is_given_up_soon_after_the_request() -> None:
    pulse = quiet_pulse()
    cancelled = []

    async def work() -> Any:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def main() -> Any:
        asyncio.get_running_loop().call_later(0.2, setattr, pulse.drain, "asked", True)
        return await pulse.attend(work(), lambda: 0)

    began = time.monotonic()
    assert asyncio.run(main()) is None
    assert cancelled == [True]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("text", "deadline"),
    [('{"deadline": 12.5}', 12.5), ('{"deadline": "soon"}', None), ("{}", None), ("[1]", None), ("", None)],
)
def test_a_request_of_odd_content_is_a_request_without_a_deadline(
    text: str, deadline: float | None, tmp_path: Path
) -> None:
    attempt = RunDir(tmp_path).attempt(1)
    attempt.folder.mkdir(parents=True)
    attempt.drain.write_text(text, encoding="utf-8")
    assert Drain(attempt).deadline() == deadline


def test_ranks_that_alone_were_told_tell_the_host_side_and_leave_what_it_said(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(1)
    attempt.folder.mkdir(parents=True)
    Drain(attempt).pass_on(rank=0)
    assert read_json(attempt.drain)["cause"] == "signal"
    said = {"cause": "preempted", "by": "Slurm", "at": 1.0, "deadline": 21.0}
    write_json(attempt.drain, said)
    Drain(attempt).pass_on(rank=0)
    assert read_json(attempt.drain) == said
