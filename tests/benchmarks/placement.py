"""Learning of the demo on a real Slurm: co-located, with a generating node, and with generation ahead of training.

    python tests/benchmarks/placement.py [--steps 900] [--seeds 0 1 2] [--cases co-located lag0 lag1 lag2]
                                         [--correction truncate] [--recipe optimizer.learning_rate=5e-4 ...]

Three nodes train in every case, and a fourth generates in all cases except co-located, with one rank per node. The
cluster of tests/slurm shares this machine's cores, so the seconds mean little. With lags of 1 and 2, --correction
corrects for older weights (grpo.importance). The digest is of the record without what may differ between runs: that of
lag 0 must equal the co-located one. Runs with a lag depend on timing, so one run cannot decide between two corrections.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

sys.path.append(str(Path(__file__).parents[1] / "slurm"))
sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from lab import Cluster
from login import Login
from records import record

APART = ("job.nodes=4", "placement.mode=partitioned", "placement.inference.nodes=1")
AHEAD = (*APART, "resume.partial=keep")
CORRECTIONS = {
    "none": (),
    "truncate": ("grpo.importance.upper=2.0"),
    "mask": ("grpo.rejection.lower=0.2", "grpo.rejection.upper=5.0"),
    "sequence": ("grpo.importance.level=sequence", "grpo.importance.upper=2.0"),
}
CASES = {
    "co-located": ("job.nodes=3",),
    "lag0": APART,
    "lag1": (*AHEAD, "async.max_lag=1"),
    "lag2": (*AHEAD, "async.max_lag=2"),
}
LIMIT_S = 1200.0
LAST = 100
"""Steps at the end over which the reward is averaged."""


def learn(login: Login, case: str, seed: int, steps: int, recipe: Sequence[str]) -> str:
    words = (*CASES[case], *recipe, "job.gpus_per_node=1", f"training.seed={seed}", f"training.steps={steps}")
    run = login.submit("demo", "--cluster", "real", *words)
    run.wait("COMPLETED", limit=LIMIT_S)
    assert run.dir.done.exists(), run.log()
    lines = run.metrics()
    rewards = [line["mean_reward"] for line in lines]
    stale = fmean(line["staleness_mean"] for line in lines)
    step_s = median(line["time/step_s"] for line in lines)
    digest = hashlib.sha256(json.dumps(record(run.dir), sort_keys=True).encode()).hexdigest()[:12]
    return (
        f"{case:12}{seed:6}{steps:8}{fmean(rewards[:LAST]):12.3f}{fmean(rewards[-LAST:]):12.3f}{stale:12.2f}{step_s:12.3f}"
        f"  {digest}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", choices=CASES, nargs="+", default=[*CASES])
    parser.add_argument("--correction", choices=CORRECTIONS, default="truncate", help="correction in cases with a lag")
    parser.add_argument("--recipe", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of every case")
    options = parser.parse_args()
    cluster = Cluster()
    with tempfile.TemporaryDirectory() as folder:
        try:
            login = Login(cluster.up(), Path(folder) / "home", Path(folder) / "share")
            login.profiles["real"] |= {"health_check": False, "environment": {"MRL_CACHE": str(cluster.cache)}}
            print(
                f"{'':12}{'seed':>6}{'steps':>8}{'reward at 1':>12}{'at the end':>12}{'staleness':>12}{'step, s':>12}"
            )
            for seed in options.seeds:
                for case in options.cases:
                    corrected = CORRECTIONS[options.correction] if case in ("lag1", "lag2") else ()
                    recipe = [*corrected, *options.recipe]
                    print(learn(login, case, seed, options.steps, recipe), flush=True)
        finally:
            cluster.down()


if __name__ == "__main__":
    main()
