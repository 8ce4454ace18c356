"""Two threads that each compute half of the rows of a decode step, where a rank has several cores of a CPU.

A step is hundreds of operators, most of them too short to be shared out: to wake a thread that waits passively, as
those of a rank do, takes as long. Halves of the rows wait for each other once a step. There are two and no more because
Python tells of one operator at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier

import torch

LEAST_ROWS = 32
"""Of a step that is halved, at least: with few rows a step is the time in which the weights are read, by each half."""

START_TIMEOUT_S = 60.0


class Halves:
    """Does steps by halves of their rows."""

    def __init__(self, threads: int, multiple: int) -> None:
        """
        threads: for the arithmetic of a step.
        multiple: of the rows of the first half.
        """
        self._threads = threads
        self._multiple = multiple
        self._pool: ThreadPoolExecutor | None = None

    def run(self, step: Callable[[slice], None], rows: slice) -> None:
        """Have `step` done with all of these rows, none of which depends on another. Raises what it does."""
        count = rows.stop - rows.start
        if self._threads == 1 or count < LEAST_ROWS:
            step(rows)
            return
        middle = rows.start + count // 2 // self._multiple * self._multiple
        pool = self._pool = self._pool or self._start()
        halves = [pool.submit(_inferring, step, half) for half in (slice(rows.start, middle), slice(middle, rows.stop))]
        wait(halves)  # both, before one's error leaves the other to itself
        for half in halves:
            half.result()

    def _start(self) -> ThreadPoolExecutor:
        started = Barrier(3)

        def begin() -> None:
            torch.get_num_threads()  # a thread that is new to torch takes as many as the process has once it asks
            torch.set_num_threads(self._threads // 2)
            started.wait(START_TIMEOUT_S)

        pool = ThreadPoolExecutor(2, thread_name_prefix="half", initializer=begin)
        for _ in range(2):
            pool.submit(int)
        started.wait(START_TIMEOUT_S)
        torch.set_num_threads(self._threads)  # of this thread, and of those that begin from now on
        return pool


@torch.inference_mode()  # which holds for one thread
def _inferring(step: Callable[[slice], None], rows: slice) -> None:
    step(rows)
