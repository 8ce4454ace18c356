"""Ranks that are threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_rl.rank.control import Control


def on_threads(ranks: int, work: Callable[[Control], Any], timeout_s: float = 20.0) -> list[Any]:
    """Do the work on every rank of a world, and return the results by rank."""
    store = dist.HashStore()

    def rank(number: int) -> Any:
        return work(Control.connect(store, number, ranks, timedelta(seconds=timeout_s)))

    with ThreadPoolExecutor(ranks) as threads:
        return [*threads.map(rank, range(ranks))]
