"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_rl.rank.control import Control


def on_threads(ranks: int, work: Callable[[Control], Any], timeout_s: float = 20.0) -> list[Any]:
    """Do the work on every rank of a world, and return the results by rank. A test that reaches its time limit in here
    leaves the threads behind: they cannot be ended, and the process does not wait for them."""
    store = dist.HashStore()
    results: list[Future[Any]] = [Future() for _ in range(ranks)]

    def rank(number: int) -> None:
        try:
            control = Control.connect(store, number, ranks, timedelta(seconds=timeout_s))
            results[number].set_result(work(control))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            results[number].set_exception(error)

    for number in range(ranks):
        threading.Thread(target=rank, args=(number,), name=f"rank {number}", daemon=True).start()
    wait(results)
    return [result.result() for result in results]
