"""Start and exit of a rank, the entry of every process that trains:

    python -m megatron_rl.rank_main --run-dir RUN_DIR --attempt N

Started once per rank by the launcher, with RANK, WORLD_SIZE and LOCAL_RANK in the environment, or Slurm's. Exit codes
are those of contract/codes.py: finished, drained (saved and left on request), bad configuration, else a crash.

Light: the black box and the listener for requests are there before torch and megatron-core, which take seconds to
load and may not load at all.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.contract.codes import (
    DRAINED,
    EXIT_CONFIG,
    EXIT_CRASHED,
    EXIT_DRAINED,
    EXIT_FINISHED,
    FINISHED,
    KILLED_TOO_S,
)
from megatron_rl.contract.paths import RunDir
from megatron_rl.errors import ConfigurationError
from megatron_rl.metrics.timeline import Timeline
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.black_box import BlackBox
from megatron_rl.rank.drain import DrainListener, leave_early
from megatron_rl.rank.world import World, die_with_parent

EXIT_CODES = {FINISHED: EXIT_FINISHED, DRAINED: EXIT_DRAINED}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.rank_main", description="One rank of a GRPO run.")
    parser.add_argument("--run-dir", type=Path, required=True, help="directory prepared by mrl-submit")
    parser.add_argument("--attempt", type=int, required=True, help="number of this start of the ranks, from 1")
    options = parser.parse_args(arguments)
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # it prints its configuration and deprecations
    timeline = Timeline()
    world = World.from_environment()
    run_dir = RunDir(options.run_dir)
    attempt = run_dir.attempt(options.attempt)
    attempt.folder.mkdir(parents=True, exist_ok=True)
    activity = Activity(attempt, published=world.rank == 0)
    box = BlackBox(attempt, world.rank, world.size, activity)
    box.start()
    drain = DrainListener(attempt)

    def exit_early() -> None:
        leave_early(attempt, world.rank, drain)
        os._exit(EXIT_DRAINED)

    drain.listen(early=exit_early)
    try:
        gc.disable()  # what imports make is no garbage, and to look for some takes a sixth of their time
        from megatron_rl.config import read_config
        from megatron_rl.platform.implementation import choose_implementation

        config = read_config(run_dir)
        choose_implementation(config)  # before megatron-core is imported, with what a run does
        if config.evaluate:
            from megatron_rl.evaluate.attempt import run_attempt
        else:
            from megatron_rl.attempt import run_attempt

        gc.freeze()
        gc.enable()
        box.start_heartbeats()
        outcome = run_attempt(run_dir, attempt, world, activity, drain, timeline)
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


if __name__ == "__main__":
    main()
