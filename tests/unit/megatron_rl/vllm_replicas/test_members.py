"""Nodes of one vLLM: how they find the first one, and when a follower leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.contract.attempt_records import Outcome
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import write
from megatron_rl.generate.vllm import members
from megatron_rl.generate.vllm.members import following, met
from megatron_rl.generate.vllm.process import VllmClosed


class Process:
    """Stands in for this node's part of vLLM: it ends after some looks."""

    def __init__(self, ends_after: int) -> None:
        self.left, self.ended = ends_after, False

    def check(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise VllmClosed("vLLM has ended (signal SIGKILL)")

    def end(self) -> None:
        self.ended = True


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "LOOK_S", 0.0)
    monkeypatch.setattr(members, "NOTED_S", 0.0)


def rank(tmp_path: Path, number: int, size: int = 2, start: int = 0) -> Any:
    replica = RunDir(tmp_path).attempt(1).replica(0)
    replica.folder.mkdir(parents=True, exist_ok=True)
    return SimpleNamespace(
        world=SimpleNamespace(rank=number, size=size),
        replica=replica,
        number=start,
        config=SimpleNamespace(job=SimpleNamespace(silence_limit_s=0)),
        activity=SimpleNamespace(beat=lambda: None),
        drain=SimpleNamespace(asked=False),
    )


def follow(here: Any, process: Process) -> None:
    start: Any = SimpleNamespace(begin=lambda: process)
    with following(here, start) as follows:
        assert callable(follows)
        follows()


def test_followers_find_the_ports_of_the_front_of_their_start(tmp_path: Path) -> None:
    front = met(rank(tmp_path, 0), 2)
    follower = met(rank(tmp_path, 1), 2)
    assert front is not None
    assert follower is not None
    assert (front.rank, follower.rank, follower.nodes) == (0, 1, 2)
    assert (front.host, front.port, front.engines_port) == (follower.host, follower.port, follower.engines_port)
    assert front.port != front.engines_port
    with pytest.raises(TimeoutError, match="did not publish its address"):
        met(rank(tmp_path, 1, start=1), 1)


def test_a_vllm_on_one_node_meets_nobody(tmp_path: Path) -> None:
    assert met(rank(tmp_path, 0, size=1), 1) is None


def test_a_follower_leaves_once_the_front_has_left(tmp_path: Path) -> None:
    here, process = rank(tmp_path, 1), Process(ends_after=3)
    here.activity.beat = lambda: write(here.replica.outcome, Outcome("finished"))
    follow(here, process)
    assert process.ended


def test_the_end_of_a_followers_vllm_ends_the_follower(tmp_path: Path) -> None:
    process = Process(ends_after=3)
    with pytest.raises(VllmClosed, match="SIGKILL"):
        follow(rank(tmp_path, 1), process)
    assert process.ended


def test_a_follower_that_is_asked_to_leave_gives_the_front_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 59.0, 61.0])
    clock = SimpleNamespace(monotonic=lambda: next(times), sleep=lambda _seconds: None)
    monkeypatch.setattr(members, "time", clock)
    here, process = rank(tmp_path, 1), Process(ends_after=3)
    here.drain.asked = True
    follow(here, process)
    assert next(times, None) is None
