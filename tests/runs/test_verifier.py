"""Answers are compared in processes that may hang or crash without affecting the caller."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from optional import needs

from megatron_rl.agent.environments.math.verifier import MathVerdict, Verifier
from megatron_rl.agent.scoring import NotJudged

pytestmark = [pytest.mark.slow, needs("math_verify")]

HANGS = r"\gcd(9^{9^{9}}, 3)"
"""Formula left to sympy, which would evaluate it for longer than the age of the universe."""


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    made = Verifier(processes=1, timeout_s=20.0, memory_gib=4.0)
    yield made
    made.close()


def children() -> set[int]:
    """Child processes of this process that were not reaped."""
    listed = (entry.read_text() for entry in Path("/proc/self/task").glob("*/children"))
    return {int(pid) for text in listed for pid in text.split()}


def children_of(verifier: Verifier) -> list[int]:
    alive = verifier.close.peek()
    assert alive is not None
    return [worker.process.pid for worker in alive[2][1] if worker.process is not None]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while running(pid):
        assert time.monotonic() < end, f"process {pid} still runs after {limit_s} s"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("golden", "answer", "right"),
    [
        ("42", "42", True),
        ("42", "42.0", True),
        ("1/2", r"\frac{1}{2}", True),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        ("1000", "1,000", True),
        ("5", "x=5", True),
        ("5", r"5\text{ cm}", True),
        ("34", "35", False),
        ("34", "nonsense {{", False),
        ("34", "", False),
        ("1", "\x00\n\ud800", False),
    ],
)
def test_mathematically_equal_answers_are_equal(verifier: Verifier, golden: str, answer: str, right: bool) -> None:
    assert asyncio.run(verifier.judge(golden, answer)) is (MathVerdict.RIGHT if right else MathVerdict.WRONG)


def test_hanging_comparison_is_killed_and_wrong_and_the_next_one_answered(caplog: pytest.LogCaptureFixture) -> None:
    """The event loop runs meanwhile."""
    verifier = Verifier(processes=1, timeout_s=1.0, memory_gib=4.0)
    before = children()

    async def compare() -> tuple[int, MathVerdict, MathVerdict]:
        assert await verifier.judge("3", "4") is MathVerdict.WRONG
        (hung,) = children() - before
        hanging, turns = asyncio.ensure_future(verifier.judge("3", HANGS)), 0
        while not hanging.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert turns > 20
        return hung, await hanging, await verifier.judge("3", "3.0")

    hung, late, next_one = asyncio.run(compare())
    assert (late, next_one) == (MathVerdict.UNDECIDED, MathVerdict.RIGHT)
    assert "1 answers count as wrong because comparing them exceeds a limit" in caplog.text
    assert not running(hung)
    (fresh,) = children() - before
    verifier.close()
    assert not running(fresh)


def test_answer_is_lost_if_the_right_one_alone_cannot_be_decided() -> None:
    verifier = Verifier(processes=1, timeout_s=1.0, memory_gib=4.0)
    with pytest.raises(NotJudged, match=r"processor time: more than 1 s \(environment.args.verify_timeout_s\)"):
        asyncio.run(verifier.judge(HANGS, r"\int_0^3 1\,dx"))
    verifier.close()


def test_dying_process_loses_one_comparison() -> None:
    """Killed like a process of a node that runs out of memory: not by what it compares."""
    verifier = Verifier(processes=1, timeout_s=20.0, memory_gib=4.0)
    before = children()

    async def compare() -> MathVerdict:
        assert await verifier.judge("3", "4") is MathVerdict.WRONG
        (child,) = children() - before
        hanging = asyncio.ensure_future(verifier.judge("3", HANGS))
        await asyncio.sleep(0.2)
        os.kill(child, signal.SIGKILL)
        with pytest.raises(NotJudged, match=r"killed: it died \(SIGKILL\)"):
            await hanging
        return await verifier.judge("3", "3.0")

    assert asyncio.run(compare()) is MathVerdict.RIGHT
    verifier.close()


def test_overlong_answer_is_wrong_without_a_comparison() -> None:
    verifier = Verifier(processes=1, timeout_s=1.0, memory_gib=4.0)
    before = children()
    assert asyncio.run(verifier.judge("3", "+".join(["x"] * 300))) is MathVerdict.WRONG
    assert asyncio.run(verifier.judge("x" * 600, "x" * 600)) is MathVerdict.RIGHT
    assert children() == before


def test_process_that_cannot_start_is_one_clear_error() -> None:
    verifier = Verifier(processes=1, timeout_s=1.0, memory_gib=0.01)
    with pytest.raises(NotJudged, match=r"did not start .*verify_memory_gib\)"):
        asyncio.run(verifier.judge("3", "4"))


def test_signals_for_the_ranks_do_not_end_a_comparison(verifier: Verifier) -> None:
    assert asyncio.run(verifier.judge("3", "4")) is MathVerdict.WRONG
    (child,) = children_of(verifier)
    for name in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        os.kill(child, name)
    assert asyncio.run(verifier.judge("3", "3.0")) is MathVerdict.RIGHT
    assert running(child)


def test_no_process_outlives_a_killed_rank() -> None:
    """One process is idle at that time, another one hangs."""
    program = f"""
import asyncio, sys
from megatron_rl.agent.environments.math.verifier import Verifier
verifier = Verifier(processes=2, timeout_s=1.0, memory_gib=4.0)
async def main():
    await asyncio.gather(verifier.judge("3", "4"), verifier.judge("4", "5"))
    hanging = asyncio.ensure_future(verifier.judge("3", {HANGS!r}))
    await asyncio.sleep(0.3)
    print(*(worker.process.pid for worker in verifier.close.peek()[2][1]), flush=True)
    await hanging
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        pids = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(pids) == 2 and all(map(running, pids))
        rank.kill()
    for pid in pids:
        wait_until_gone(pid, limit_s=6.0)
