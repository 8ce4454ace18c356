"""Output of a reward function: divided at its marks wherever the pipe cuts it, and bounded in the log."""

from __future__ import annotations

import re
import subprocess
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.own_process.scoring_worker import is_outside
from megatron_rl.rank.processes.printed import PRINTED_CHARACTERS, LogBudget, Printed

MARK = "0123456789abcdef"
TEXTS = st.lists(st.text(st.sampled_from("ab\n\0" + MARK[:3]), max_size=9), max_size=5)


@given(TEXTS, st.lists(st.integers(1, 40), max_size=9))
def test_each_answer_has_the_output_before_its_mark(texts: list[str], sizes: list[int]) -> None:
    found: dict[int, str] = {}
    printed = Printed(re.compile(b"\0" + MARK.encode() + rb" (\d+)\n"), found.__setitem__)
    stream = "".join(f"{text}\0{MARK} {number}\n" for number, text in enumerate(texts)).encode()
    for size in sizes:
        printed.add(stream[:size])
        stream = stream[size:]
    printed.add(stream)
    assert found == dict(enumerate(texts))


def test_only_the_end_of_a_long_output_is_kept() -> None:
    found: dict[int, str] = {}
    printed = Printed(re.compile(b"\0" + MARK.encode() + rb" (\d+)\n"), found.__setitem__)
    for _ in range(50):
        printed.add(b"x" * 1000)
    printed.add(f"end\0{MARK} 7\n".encode())
    assert found[7] == "x" * (PRINTED_CHARACTERS - 3) + "end"


def test_log_has_a_budget_for_each_period_and_says_what_it_withheld() -> None:
    with mock.patch("megatron_rl.rank.processes.printed.time.monotonic") as clock:
        clock.return_value = 5.0
        budget = LogBudget()
        assert budget.spend("x" * LogBudget.CHARACTERS) is not None
        assert [budget.spend("more"), budget.spend("more")] == [None, None]
        clock.return_value += LogBudget.PERIOD_S
        assert budget.spend("again") == "(the output for 2 answers was not logged)\nagain"
        assert budget.spend("and again") == "and again"


class FromAClient(Exception):
    __module__ = "httpx._exceptions"


def test_errors_of_networks_and_limits_are_told_from_those_of_the_function() -> None:
    outside = [ConnectionResetError(), TimeoutError(), OSError(5, "I/O"), BlockingIOError(), FromAClient()]
    inside = [KeyError(), FileNotFoundError(), PermissionError(), ValueError(), subprocess.TimeoutExpired("x", 1)]
    assert all(map(is_outside, outside)) and not any(map(is_outside, inside))
