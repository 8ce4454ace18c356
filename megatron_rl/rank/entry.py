"""Start and exit of a rank of any world: how it is seen, how it is asked to leave, and by which exit code it ends.

Light: the black box and the listener for requests are there before torch and megatron-core, which take seconds to
load and may not load at all.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from megatron_rl.contract.codes import (
    DRAINED,
    EXIT_CONFIG,
    EXIT_CRASHED,
    EXIT_DRAINED,
    EXIT_FINISHED,
    FINISHED,
    KILLED_TOO_S,
)
from megatron_rl.contract.paths import RankFiles
from megatron_rl.errors import ConfigurationError
from megatron_rl.metrics.timeline import Timeline
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.black_box import BlackBox
from megatron_rl.rank.drain import DrainListener, leave_early
from megatron_rl.rank.world import World

GC_STEPS = 50
"""Training steps between garbage collections."""
FULL_GC_STEPS = 500
"""Training steps between collections that also examine the oldest generation."""

EXIT_CODES = {FINISHED: EXIT_FINISHED, DRAINED: EXIT_DRAINED}

Work = Callable[[Activity, DrainListener, Timeline], str]
"""What a rank does between start and exit. Returns FINISHED or DRAINED, once it is on disk."""


def run_rank(files: RankFiles, world: World, load: Callable[[], Work], *, tells_host: bool = True) -> NoReturn:
    """Run a rank, and end the process. Its parent's death is the caller's to notice.

    Args:
        load: imports what the work needs, and returns it.
        tells_host: see DrainListener.
    """
    for stream in (sys.stdout, sys.stderr):  # a reward may print an answer, and the locale of a node lack a character
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # it prints its configuration and deprecations
    for library in ("httpx", "uvicorn"):
        logging.getLogger(library).setLevel(logging.WARNING)  # they tell of every request
    timeline = Timeline()
    files.folder.mkdir(parents=True, exist_ok=True)
    activity = Activity(files, published=world.rank == 0)
    box = BlackBox(files, world.rank, world.size, activity)
    box.start()
    drain = DrainListener(files, tells_host=tells_host)

    def exit_early() -> None:
        leave_early(files, world.rank, drain)
        os._exit(EXIT_DRAINED)  # from the listener's thread: sys.exit would end that alone

    drain.listen(early=exit_early)
    try:
        gc.disable()  # what imports make is no garbage, and to look for some takes a sixth of their time
        work = load()
        gc.freeze()
        gc.enable()
        box.start_heartbeats()
        outcome = work(activity, drain, timeline)
    except Exception as error:  # noqa: BLE001 - the one place that turns any failure into an error file
        code = EXIT_CONFIG if isinstance(error, ConfigurationError) else EXIT_CRASHED
        if drain.asked:
            time.sleep(KILLED_TOO_S)  # what failed may be the connection to one that was killed: no crash to report
        box.report_failure(error, code)
        logging.shutdown()
        # A normal exit would wait for collectives that the other ranks will never join.
        os._exit(code)
    box.stop()
    gc.freeze()  # the interpreter would look for garbage in all that torch has made, for seconds, before it ends
    sys.exit(EXIT_CODES[outcome])


@contextmanager
def gc_between_steps() -> Iterator[Callable[[int], None]]:
    """Disable automatic garbage collection and yield the function that every rank calls after each step.

    Automatic collection starts on one rank now and on another then, and all others wait for it in their next
    collective. Objects that exist already are never examined: the modules of torch and megatron-core alone would take
    a third of a second.
    """

    def collect(step: int) -> None:
        if step % GC_STEPS == 0:
            gc.collect(1 if step % FULL_GC_STEPS else 2)

    gc.disable()
    gc.freeze()
    try:
        yield collect
    finally:
        gc.unfreeze()
        gc.enable()
