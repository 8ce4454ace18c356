"""Cost of a preemption: seconds until the checkpoint, repeated work, and seconds until training continues.

    python tests/benchmarks/preemption.py [--repeats 5] [--folder DIR]

The demo on two ranks, saved every 100 steps as shipped. In turns it is asked to leave (SIGTERM to the ranks, as in a
preemption) and killed (SIGKILL, as without a drain), some steps after its last checkpoint, and restarted. All figures
come from the run's own record.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from launcher.recipe.load import load_recipe
from megatron_rl.contract.attempt_records import MetricsLine, TimelineLine
from megatron_rl.contract.codes import EXIT_DRAINED
from megatron_rl.contract.manifest import MANIFEST
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import Unreadable, read_lines

RANKS = 2
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Preemption:
    saved_s: float | None
    """Seconds from the signal to the published checkpoint; None without one."""
    left_s: float
    """Seconds from the signal until all ranks were gone."""
    lost_s: float
    """Seconds of training that the next start repeated."""
    back_s: float
    """Seconds from the next start of the ranks to the end of the first new step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="preemptions of each kind (default: 5)")
    parser.add_argument("--folder", type=Path, help="folder on the measured file system (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(RunDir(Path(folder) / "run"), options.repeats)
    print(f"{'':8} {'saved':>8} {'left':>8} {'repeated':>10} {'back':>8}   seconds, medians of {options.repeats}")
    for kind, preemptions in found.items():
        saved = [each.saved_s for each in preemptions if each.saved_s is not None]
        columns = [f"{statistics.median(saved):8.2f}" if saved else f"{'-':>8}"]
        for name, width in (("left_s", 8), ("lost_s", 10), ("back_s", 8)):
            columns.append(f"{statistics.median(getattr(each, name) for each in preemptions):{width}.2f}")
        print(f"{kind:8} {' '.join(columns)}")


def measure(run: RunDir, repeats: int) -> dict[str, list[Preemption]]:
    run.root.mkdir(parents=True)
    config = load_recipe("demo", ["training.steps=1000000"]).config
    run.resolved.write_text(yaml.safe_dump(config.model_dump()), encoding="utf-8")
    moments = random.Random(5)
    found: dict[str, list[Preemption]] = {"drained": [], "killed": []}
    ranks, number = start(run, 1), 1
    try:
        for _ in range(repeats):
            for kind, number_sent in (("drained", signal.SIGTERM), ("killed", signal.SIGKILL)):
                checkpoint = next(iter(run.checkpoint_steps()), 0)
                await_step(run, ranks, (checkpoint // 100 + 1) * 100 + moments.randrange(20, 90))
                asked = time.time()
                for rank in ranks:
                    rank.send_signal(number_sent)
                codes = [rank.wait(timeout=LIMIT_S) for rank in ranks]
                gone = time.time()
                assert codes == [EXIT_DRAINED if kind == "drained" else -signal.SIGKILL] * RANKS, codes
                newest = run.checkpoint_steps()[0]
                published = (run.checkpoint(newest) / MANIFEST).stat().st_mtime
                reached = records(MetricsLine, run.metrics)[-1].step
                repeated = [line for line in records(MetricsLine, run.metrics) if line.step > newest]
                number += 1
                began = time.time()
                ranks = start(run, number)
                await_step(run, ranks, reached + 1)
                found[kind].append(
                    Preemption(
                        saved_s=published - asked if published > asked else None,
                        left_s=gone - asked,
                        lost_s=sum(line.values["time/step_s"] for line in repeated)
                        + under_way(run.attempt(number - 1), asked),
                        back_s=ended(run.attempt(number), reached + 1) - began,
                    )
                )
                print(kind, asdict(found[kind][-1]), flush=True)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return found


def start(run: RunDir, number: int) -> list[subprocess.Popen[bytes]]:
    attempt = run.attempt(number)
    attempt.logs.mkdir(parents=True)
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MRL_PARENT_PID": str(os.getpid())}
    command = [sys.executable, "-W", "ignore", "-m", "megatron_rl.rank_main", "--run-dir", str(run.root)]
    ranks = []
    for rank in range(RANKS):
        who = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        with attempt.log(rank).open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    [*command, "--attempt", str(number)], env=os.environ | threads | who, stdout=log, stderr=log
                )
            )
    return ranks


def await_step(run: RunDir, ranks: list[subprocess.Popen[bytes]], step: int) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not any(line.step >= step for line in records(MetricsLine, run.metrics)[-1:]):
        assert all(rank.poll() is None for rank in ranks), f"a rank ended before step {step}: see {run.root}/logs"
        assert time.monotonic() < give_up, f"no step {step} within {LIMIT_S:.0f} s"
        time.sleep(0.005)


def ended(attempt: Attempt, step: int) -> float:
    """Time at which a step of this attempt was done."""
    return next(line.at for line in records(TimelineLine, attempt.timeline) if line.step == step)


def under_way(attempt: Attempt, asked: float) -> float:
    """Seconds of the interrupted step."""
    return asked - max(line.at for line in records(TimelineLine, attempt.timeline) if line.at <= asked)


def records(kind: type[Any], path: Path) -> list[Any]:
    lines = read_lines(kind, path)
    assert not isinstance(lines, Unreadable)
    return lines.records


if __name__ == "__main__":
    main()
