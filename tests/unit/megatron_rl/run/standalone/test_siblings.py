"""Ranks that one process starts: they end with it, and it never waits for a lost one."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.run.standalone import siblings as module
from megatron_rl.run.standalone.siblings import siblings

RANK = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.stdin.read())
(folder / "pid.draft").write_text(str(os.getpid()))
(folder / "pid.draft").rename(folder / "pid")
"""
LIMIT_S = 30.0


class Ended(BaseException):
    """Raised instead of ending this process."""


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a module whose end each test writes."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(module, "MET_S", 0.5)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(module.tempfile, "tempdir", None)
    return tmp_path


def write(folder: Path, end: str) -> None:
    (folder / "some_rank.py").write_text(RANK + end)


def until_there(file: Path) -> str:
    give_up = time.monotonic() + LIMIT_S
    while not file.exists():
        assert time.monotonic() < give_up
        time.sleep(0.01)
    return file.read_text()


def unexpected(why: str) -> None:
    raise AssertionError(why)


def test_process_without_siblings_is_alone(tmp_path: Path) -> None:
    with siblings("nobody_starts_this", "", 1, unexpected) as place:
        assert (place.rank, place.size) == (0, 1)


def test_siblings_end_with_the_body(rank: Path) -> None:
    write(rank, "time.sleep(600)")
    with siblings("some_rank", str(rank), 2, unexpected) as place:
        assert (place.rank, place.size, place.local_rank) == (0, 2, 0)
        pid = int(until_there(rank / "pid"))
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not list(rank.glob("mrl-ranks-*"))


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 has ended (SIGKILL)"),
        ("sys.stderr.write('out of memory\\n'); sys.exit(1)", "rank 1 has ended (exit code 1): out of memory"),
        ("", "rank 1 has ended (exit code 0)"),
    ],
)
def test_process_that_waits_for_a_lost_rank_ends_with_the_reason(rank: Path, end: str, said: str) -> None:
    write(rank, end)
    told: list[str] = []
    ended = threading.Event()

    def lost(why: str) -> None:
        told.append(why)
        ended.set()

    with siblings("some_rank", str(rank), 2, lost):
        assert ended.wait(LIMIT_S), "otherwise this process would still wait"
    assert told == [said]


def test_refusal_of_a_rank_keeps_its_message(rank: Path) -> None:
    write(rank, "sys.stderr.write('rank 1 of this node has no GPU\\n'); sys.exit(2)")
    with pytest.raises(ConfigurationError, match=r"^rank 1 of this node has no GPU$"):  # noqa: SIM117
        with siblings("some_rank", str(rank), 2, unexpected):
            until_there(rank / "pid")
            raise RuntimeError("connection closed by peer")


def test_failure_caused_by_a_lost_rank_is_reported_as_its_loss(rank: Path) -> None:
    write(rank, "os.kill(os.getpid(), signal.SIGKILL)")

    def lost(why: str) -> None:
        raise Ended(why)

    with pytest.raises(Ended, match=r"rank 1 has ended \(SIGKILL\)"):  # noqa: SIM117
        with siblings("some_rank", str(rank), 2, lost):
            raise RuntimeError("connection closed by peer")


def test_own_failure_of_this_process_stays_unchanged(rank: Path) -> None:
    write(rank, "time.sleep(600)")
    with pytest.raises(RuntimeError, match="out of memory"):  # noqa: SIM117
        with siblings("some_rank", str(rank), 2, unexpected):
            raise RuntimeError("out of memory")
