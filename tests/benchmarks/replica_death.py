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
from collections.abc import Callable
from pathlib import Path
from statistics import median

LIMIT_S = 120.0
MODULE = "megatron_rl.replica_main"
RECIPE = (
    *("demo", "--cluster", "local", "job.gpus_per_node=1", "job.nodes=3", "training.steps=100000", "save.every=100000"),
    *("placement.mode=partitioned", "placement.inference.nodes=2", "resume.partial=keep", "evaluation.every=0"),
)


def lines(root: Path) -> list[dict[str, float]]:
    file = root / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(what: Callable[[], bool]) -> float:
    """Seconds until a condition holds."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < LIMIT_S, "the condition did not come true"
        time.sleep(0.002)
    return time.monotonic() - began


def replicas(root: Path) -> list[int]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=3)
    parser.add_argument("--max-lag", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(0)
    print(f"{'step before, s':>16}{'step of the death, s':>22}{'both there again, s':>22}")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "run"
        command = [Path(sys.executable).with_name("mrl-submit"), *RECIPE, "--run-dir", root]
        command.append(f"async.max_lag={options.max_lag}")
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as run:
            try:
                for _ in range(options.deaths):
                    wait_for(lambda: len(lines(root)) > 20 and lines(root)[-1]["system/replicas"] == 2)
                    count = len(lines(root))
                    wait_for(lambda count=count: len(lines(root)) >= count + 20)  # type: ignore[misc]
                    before = median(line["time/step_s"] for line in lines(root)[-20:])
                    time.sleep(chance.random() * before)
                    done = len(lines(root))
                    os.kill(chance.choice(replicas(root)), signal.SIGKILL)
                    wait_for(lambda done=done: len(lines(root)) >= done + 3)  # type: ignore[misc]
                    longest = max(line["time/step_s"] for line in lines(root)[done : done + 3])
                    back_s = wait_for(lambda: lines(root)[-1]["system/replicas"] == 2)
                    print(f"{before:16.2f}{longest:22.2f}{back_s:22.1f}", flush=True)
            finally:
                run.send_signal(signal.SIGINT)
                run.wait(LIMIT_S)


if __name__ == "__main__":
    main()
