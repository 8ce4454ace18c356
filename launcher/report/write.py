"""Writes pages: reads the runs, and puts each page into its file at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import BadInput, Failed
from launcher.report.compare import Comparison
from launcher.report.page import comparison_page, run_page
from launcher.report.read import read_report
from launcher.report.server import PageServer
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir

RENEWED_S = 5.0
"""Seconds between two pages of a run that is followed."""
SHARE = 0.15
"""Largest share of the time that reading the run takes: a login node is shared."""


def write_run(run: RunDir, file: Path) -> int:
    """Write the page of a run. Returns its bytes. Raises Failed and BadInput."""
    now = time.time()
    with _without_collection():
        return _write(file, run_page(read_report(run, now), now))


def write_comparison(comparison: Comparison, file: Path) -> int:
    return _write(file, comparison_page(comparison, time.time()))


def follow_run(
    run: RunDir, file: Path, announce: Callable[[str], None], warn: Callable[[str], None] = lambda reason: None
) -> None:
    """Serve the page of a run, and renew it and its file until Ctrl-C. Raises Failed and BadInput for the first page;
    where a later one fails, the last good page stays, since the record may be unreadable for a moment.

    Args:
        announce: gets the address, which contains the token.
        warn: gets the reason when the page can no longer be renewed.
    """
    began = time.monotonic()
    page = _renewed(run, file)
    with PageServer(page) as server:
        announce(server.address)
        try:
            while True:
                time.sleep(max(RENEWED_S, (time.monotonic() - began) * (1 / SHARE - 1)))
                began = time.monotonic()
                try:
                    server.page = _renewed(run, file)
                    server.stale = False
                except (Failed, BadInput) as error:
                    if not server.stale:
                        warn(f"the page is not renewed: {error}")
                    server.stale = True
        except KeyboardInterrupt:
            return


def _renewed(run: RunDir, file: Path) -> str:
    now = time.time()
    with _without_collection():
        report = read_report(run, now)
        _write(file, run_page(report, now))
        return run_page(report, now, live=True)


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
