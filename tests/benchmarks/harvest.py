"""Rollouts per second while harvested replicas come and go: is a run as fast as its replicas?

    python tests/benchmarks/harvest.py [--steps 4] [--token-ms 8]

One steady replica, and up to three that are started, and killed during generation, as jobs of a harvest partition are.
Everything except the arithmetic is real, as in split.py: a token takes a given time. Generation runs two steps ahead,
so that the longest answers of a batch leave no replica idle, and training is too fast to be the bottleneck.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from split import ROWS, WORK, Run, costs, start_replica

from launcher.simulate.scenario import Scenario, Split
from megatron_rl.contract.paths import RunDir

THERE = (1, 2, 4, 3, 1)
"""Number of replicas in each phase."""
LEAD = 3
"""Steps of each phase before the measured ones, until new replicas have weights and requests."""


class Replicas:
    """Replica processes, of which the first is never killed."""

    def __init__(self, root: Path, token_s: float) -> None:
        self._root, self._token_s = root, token_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._starts: Counter[int] = Counter()

    def be(self, count: int) -> None:
        while len(self._processes) > count:
            process = self._processes.pop()
            process.kill()
            process.wait()
        while len(self._processes) < count:
            number = len(self._processes)
            self._processes.append(start_replica(number, self._root, self._token_s, self._starts[number]))
            self._starts[number] += 1


async def measure(run: Run, replicas: Replicas, steps: int) -> None:
    """Print a line for each phase."""
    alone, step, ended_at = None, 0, run.measured.ended_at
    run.start()
    for count in THERE:
        replicas.be(count)
        await run.see(count)
        for _ in range(LEAD + steps):
            await run.step(step)
            step += 1
        rate = steps * WORK.prompts * WORK.group_size / (ended_at[-1] - ended_at[-1 - steps])
        alone = alone or rate
        print(f"{count:14}{rate:14.2f}{rate / alone:15.2f}", flush=True)
    await run.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each phase")
    parser.add_argument("--token-ms", type=float, default=8.0, help="milliseconds of a token in one row")
    options = parser.parse_args()
    token_s = options.token_ms / 1e3
    share = costs(token_s)
    scenario = Scenario(WORK, replace(share, train_token_s=share.train_token_s / 20), Split(5, 1, 4), max_lag=2)
    print(f"replicas there{'rollouts/s':>14}{'of the first':>15}")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        root = Path(folder) / "0"
        attempt = RunDir(root).attempt(1)
        attempt.folder.mkdir(parents=True)
        run, replicas = Run(scenario, [attempt]), Replicas(root, token_s)
        try:
            asyncio.run(measure(run, replicas, options.steps))
        finally:
            run.close()
            replicas.be(0)
    print(f"rows of a replica: {ROWS}; staleness at most {run.measured.staleness_max}")


if __name__ == "__main__":
    main()
