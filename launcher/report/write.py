"""Writes pages: reads the runs, and puts each page into its file at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import Failed
from launcher.report.compare import Comparison
from launcher.report.page import comparison_page, run_page
from launcher.report.read import read_report
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir


def write_run(run: RunDir, file: Path) -> int:
    """Write the page of a run. Returns its bytes. Raises Failed and BadInput."""
    now = time.time()
    with _without_collection():
        return _write(file, run_page(read_report(run, now), now))


def write_comparison(comparison: Comparison, file: Path) -> int:
    return _write(file, comparison_page(comparison, time.time()))


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause the collector of reference cycles: a record has millions of lists, none of them in a cycle, and looking
    through them again and again takes a third of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _write(file: Path, page: str) -> int:
    try:
        write_atomic(file, page, durable=False)
    except OSError as error:
        raise Failed(f"{file}: cannot be written: {error.strerror}; --out names another file") from error
    return len(page.encode("utf-8"))
