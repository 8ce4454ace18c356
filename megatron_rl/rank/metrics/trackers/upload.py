"""Show the record of a run to a tracker:

    python -P -m megatron_rl.rank.metrics.trackers.upload wandb RUN_DIR

mirror.py starts it beside the run; started by hand it shows what the tracker misses of a run that has ended.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

import yaml

from megatron_rl.contract.codes import EXIT_CRASHED
from megatron_rl.contract.paths import TRACKERS, Attempt, RunDir
from megatron_rl.contract.records import Unreadable, read, write
from megatron_rl.contract.run_records import TrackerRun
from megatron_rl.rank.metrics.trackers.tracker import ServiceTracker, TrackedRun, TrackerRefused, follow
from megatron_rl.recipe.config import RunConfig

PATIENCE_S = 30.0  # seconds for a file that cannot be read


def upload(name: str, run: RunDir, attempt: Attempt, over: threading.Event) -> None:
    """Show the record until `over` reports that it is complete. Raises TrackerRefused, and what the package raises."""
    recipe = yaml.safe_load(run.resolved.read_text(encoding="utf-8"))
    logging = RunConfig.model_validate(recipe).logging
    if name not in logging.trackers:
        raise TrackerRefused(f"{run.resolved} has no logging.{name}")
    file = run.tracker(name)
    found = read(TrackerRun, file, PATIENCE_S)
    if isinstance(found, Unreadable):
        raise TrackerRefused(f"{found}: delete the file to start a second run of {name} for this run")
    known = found if isinstance(found, TrackerRun) else TrackerRun(secrets.token_hex(8))
    write(file, known)  # before the tracker learns the id
    tracker = opened(name, TrackedRun(run, known, recipe, logging))
    known = known._replace(url=tracker.url)
    write(file, known)
    follow(run, attempt, tracker, over, known.evaluated, lambda step: write(file, known._replace(evaluated=step)))


def opened(name: str, tracked: TrackedRun) -> ServiceTracker:
    """Open a tracker. The import of its package takes a second, and only that of this one is installed."""
    if name == "wandb":
        from megatron_rl.rank.metrics.trackers.wandb_tracker import WandbTracker

        return WandbTracker(tracked)
    if name == "mlflow":
        from megatron_rl.rank.metrics.trackers.mlflow_tracker import MlflowTracker

        return MlflowTracker(tracked)
    from megatron_rl.rank.metrics.trackers.trackio_tracker import TrackioTracker

    return TrackioTracker(tracked)


def end_in_time(life_line: int | None, limit_s: float, over: threading.Event) -> None:
    """Set `over` once the record is complete, as its writer says or dies; end this process `limit_s` later.

    life_line: descriptor of a pipe that then ends; None: the record is complete.
    """
    if life_line is not None:
        os.read(life_line, 1)
    over.set()
    time.sleep(limit_s)
    leave(f"the tracker took longer than {limit_s:g} s to take the last steps")


def leave(why: str) -> NoReturn:
    """End this process at once, without the exit hooks of a tracker's package.

    A helper process such as wandb-core notices and follows.

    why: one line; rank 0 logs the last line of this process.
    """
    sys.stderr.write(" ".join(why.split()) + "\n")
    sys.stderr.flush()
    os._exit(EXIT_CRASHED)  # a regular exit runs those hooks, which may wait for a network that is gone


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rl.rank.metrics.trackers.upload", description="Show the record of a run to a tracker."
    )
    parser.add_argument("tracker", choices=TRACKERS)
    parser.add_argument("run_dir", type=Path, help="run directory whose resolved.yaml has logging.TRACKER")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that the last steps may take")
    parser.add_argument("--until", type=int, help="descriptor of a pipe that ends with the run; default: it has ended")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of a step, but meant for the ranks
    run = RunDir(options.run_dir)
    attempt, over = run.attempt(run.last_attempt()), threading.Event()
    threading.Thread(target=end_in_time, args=(options.until, options.limit, over), daemon=True).start()
    try:
        upload(options.tracker, run, attempt, over)
    except TrackerRefused as refused:
        leave(str(refused))
    except Exception as error:  # noqa: BLE001 - packages raise many kinds
        traceback.print_exc()
        leave(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
