"""Garbage collection between steps, on all ranks at once.

Left alone, Python looks for garbage when a rank has allocated enough: now on one, then on another, and each time all
others wait for it in their next collective.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 50  # steps
THOROUGH_EVERY = 500  # steps; then also in what has outlived such a look


def collect(step: int) -> None:
    """Called by every rank after each step."""
    if step % EVERY == 0:
        gc.collect(1 if step % THOROUGH_EVERY else 2)


@contextmanager
def collected_between_steps() -> Iterator[None]:
    """Meanwhile nothing is collected but by `collect`, which passes over all that there is now: the modules of torch
    and megatron-core alone are a third of a second."""
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()
