"""Steps of which two threads do half each."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from megatron_rl.platform.halves import LEAST_ROWS, Halves


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_each_row_is_in_one_half_the_first_of_which_is_a_multiple() -> None:
    done: list[tuple[int, int]] = []
    Halves(2, multiple=4).run(lambda rows: done.append((rows.start, rows.stop)), slice(3, 3 + LEAST_ROWS + 7))
    (start, middle), (again, stop) = sorted(done)
    assert (start, again, stop) == (3, middle, 3 + LEAST_ROWS + 7)
    assert (middle - start) % 4 == 0
    assert abs((middle - start) - (stop - middle)) < 8


def test_halves_run_together_on_half_of_the_arithmetic_threads_each() -> None:
    seen: list[tuple[int, bool]] = []
    both = threading.Barrier(2)

    def step(_: slice) -> None:
        both.wait(60)
        seen.append((torch.get_num_threads(), torch.is_inference_mode_enabled()))

    torch.set_num_threads(4)
    Halves(4, multiple=4).run(step, slice(0, LEAST_ROWS))
    assert seen == [(2, True)] * 2
    assert torch.get_num_threads() == 4, "those of the caller"


def test_few_rows_and_those_of_one_core_are_done_by_the_caller() -> None:
    seen: list[tuple[slice, threading.Thread]] = []
    for halves, rows in ((Halves(2, 4), slice(0, LEAST_ROWS - 1)), (Halves(1, 4), slice(0, 100))):
        halves.run(lambda rows: seen.append((rows, threading.current_thread())), rows)
        assert seen.pop() == (rows, threading.current_thread())


def test_an_error_comes_when_neither_half_is_under_way() -> None:
    failed, through = threading.Event(), []

    def step(rows: slice) -> None:
        if rows.start == 0:
            failed.set()
            raise ValueError("the first half")
        assert failed.wait(60)
        through.append(rows)

    with pytest.raises(ValueError, match="the first half"):
        Halves(2, 4).run(step, slice(0, LEAST_ROWS))
    assert through
