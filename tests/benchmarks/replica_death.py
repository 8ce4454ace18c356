"""Cost of the death of an inference replica: seconds until the current step is done, and until the replica is back.

    python tests/benchmarks/replica_death.py [--deaths 3] [--max-lag 0]

The demo on this machine, started by mrl-submit, with one training rank and two replicas. Again and again one of them is
killed (SIGKILL) at a random moment of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

LIMIT_S = 300.0
MODULE = "megatron_rl.replica_main"
PARTITIONED = (
    *("--cluster", "local", "job.gpus_per_node=1", "training.steps=100000", "save.every=100000"),
    *("placement.mode=partitioned", "resume.partial=keep", "evaluation.every=0"),
)


@dataclass(frozen=True)
class Death:
    """Cost of one death, in seconds."""

    before_s: float
    """A step before it, the median of twenty."""
    step_s: float
    """The longest of the steps during and after it."""
    back_s: float
    """Time from the signal until a step was recorded with all replicas."""


def lines(root: Path) -> list[dict[str, float]]:
    file = root / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(what: Callable[[], bool]) -> None:
    """Return when a condition holds."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < LIMIT_S, "the condition did not come true"
        time.sleep(0.002)


def processes_of_replicas(root: Path) -> list[int]:
    """Processes of the replicas."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if {MODULE.encode(), str(root).encode()} <= {*words}:
            found.append(int(folder.name))
    return found


def deaths(root: Path, recipe: Sequence[str], replicas: int, count: int) -> Iterator[Death]:
    """Start a run, and kill one of its replicas at a random moment of a step, again and again.

    root: directory of the run, to be created.
    """
    chance = random.Random(0)
    sizes = (f"job.nodes={1 + replicas}", f"placement.inference.nodes={replicas}")
    command = [Path(sys.executable).with_name("mrl-submit"), *recipe, *PARTITIONED, *sizes, "--run-dir", root]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as run:

        def until(what: Callable[[], bool]) -> None:
            wait_for(lambda: what() or run.poll() is not None)
            assert run.poll() is None, f"the run has ended: see {root}/logs"

        def complete() -> bool:
            return lines(root)[-1]["system/replicas"] == replicas

        try:
            for _ in range(count):
                until(lambda: len(lines(root)) > 20 and complete())
                first = len(lines(root))
                until(lambda first=first: len(lines(root)) >= first + 20)  # type: ignore[misc]
                before = median(line["time/step_s"] for line in lines(root)[-20:])
                time.sleep(chance.random() * before)
                done = len(lines(root))
                os.kill(chance.choice(processes_of_replicas(root)), signal.SIGKILL)
                killed = time.monotonic()
                until(lambda done=done: len(lines(root)) > done + 1 and complete())  # type: ignore[misc]
                back = time.monotonic() - killed
                until(lambda done=done: len(lines(root)) >= done + 3)  # type: ignore[misc]
                yield Death(before, max(line["time/step_s"] for line in lines(root)[done : done + 3]), back)
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(LIMIT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=3)
    parser.add_argument("--max-lag", type=int, default=0)
    options = parser.parse_args()
    print(f"{'step before, s':>16}{'step of the death, s':>22}{'both there again, s':>22}")
    with tempfile.TemporaryDirectory() as folder:
        recipe = ("demo", f"async.max_lag={options.max_lag}")
        for death in deaths(Path(folder).resolve() / "run", recipe, replicas=2, count=options.deaths):
            print(f"{death.before_s:16.2f}{death.step_s:22.2f}{death.back_s:22.1f}", flush=True)


if __name__ == "__main__":
    main()
