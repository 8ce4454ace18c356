"""Start and exit of a rank in any world: logging, heartbeats, requests to leave, exit code.

Imports little: the black box and the drain listener start before torch and megatron-core, which take seconds to import
and may fail to.
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
from megatron_rl.contract.files import compiler_cache
from megatron_rl.contract.owned_folders import remove_ownerless
from megatron_rl.contract.paths import RankFiles
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.black_box import BlackBox, LogFormatter
from megatron_rl.rank.drain import DrainListener, leave_early
from megatron_rl.rank.metrics.timeline import Timeline
from megatron_rl.rank.world import World
from megatron_rl.recipe.errors import ConfigurationError

GC_STEPS = 50  # training steps between garbage collections
FULL_GC_STEPS = 500  # training steps between collections that also examine the oldest generation

EXIT_CODES = {FINISHED: EXIT_FINISHED, DRAINED: EXIT_DRAINED}

Work = Callable[[Activity, DrainListener, Timeline], str]
"""Work of a rank between start and exit. Returns FINISHED or DRAINED once that is on disk."""


def run_rank(files: RankFiles, world: World, load: Callable[[], Work], *, notifies_host: bool = True) -> NoReturn:
    """Run a rank and end the process. The caller watches for the death of the parent.

    Args:
        load: imports and returns the work.
        notifies_host: passed to DrainListener.
    """
    for stream in (sys.stdout, sys.stderr):  # a reward may print a character that the node's locale lacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # it prints its configuration and deprecations
    for library in ("httpx", "uvicorn"):
        logging.getLogger(library).setLevel(logging.WARNING)  # they log every request
    # Otherwise torch (seen in 2.11 and 2.13) compiles in processes beside this one. A signal that asks the ranks to
    # leave ends them, and the next compilation waits for them for ever.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", compiler_cache())
    timeline = Timeline()
    files.folder.mkdir(parents=True, exist_ok=True)
    activity = Activity(files, published=world.rank == 0)
    box = BlackBox(files, world.rank, world.size, activity, world.local_rank)
    box.start()
    if world.local_rank == 0:
        remove_ownerless()  # such as the folders of programs of a run whose step Slurm has killed here
    drain = DrainListener(files, notifies_host=notifies_host)

    def exit_early() -> None:
        leave_early(files, world.rank, drain)
        os._exit(EXIT_DRAINED)  # this is the listener's thread: sys.exit would end only the thread

    drain.listen(early=exit_early)
    try:
        gc.disable()  # imports leave no garbage, and searching for it takes a sixth of their time
        work = load()
        gc.freeze()
        gc.enable()
        box.start_heartbeats()
        outcome = work(activity, drain, timeline)
    except Exception as error:  # noqa: BLE001 - the one place that turns any failure into an error file
        code = EXIT_CONFIG if isinstance(error, ConfigurationError) else EXIT_CRASHED
        if drain.asked:
            time.sleep(KILLED_TOO_S)  # the failure may be a lost connection to a killed rank: no crash to report
        box.report_failure(error, code)
        logging.shutdown()
        # A normal exit would wait for collectives that the other ranks will never join.
        os._exit(code)
    box.stop()
    gc.freeze()  # otherwise the interpreter spends seconds on a last collection of torch's objects
    sys.exit(EXIT_CODES[outcome])


@contextmanager
def gc_between_steps() -> Iterator[Callable[[int], None]]:
    """Disable automatic garbage collection and yield the function that every rank calls after each step.

    Automatic collection starts at a different time on each rank, and all others wait for it in their next collective.
    Collections skip the objects that exist already: the modules of torch and megatron-core alone take a third of a
    second.
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
