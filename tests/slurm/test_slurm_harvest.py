"""Inference replicas in jobs of their own on nodes that others may take at any time."""

from __future__ import annotations

import json

from lab import wait_until
from login import Login, Run
from records import OVERRIDES

SHAPE = ("placement.mode=partitioned", "job.nodes=2", "job.gpus_per_node=1", "placement.inference.nodes=1")
HARVEST = ("harvest.partition=low", "harvest.max_replicas=1")
LIMIT_S = 300.0


def replicas(run: Run) -> int:
    """That answer, by the newest step."""
    return int(run.metrics()[-1]["system/replicas"])


def jobs(run: Run, what: str) -> str:
    return run.lab.run("squeue", "--noheader", f"--name={run.dir.root.name}-harvest", f"--format={what}").strip()


def test_they_come_and_go_and_the_run_misses_nothing(login: Login) -> None:
    """The job's node is taken away in mid-run; the next one finds another."""
    login.profiles["real"] |= {
        "partition": "high",
        "health_check": False,
        "environment": {"MRL_CACHE": str(login.lab.cache)},
    }
    login.confine(1, 4)
    here = "harvest.sbatch=" + json.dumps(login.profiles["real"]["sbatch"])
    run = login.submit("demo", "--cluster", "real", *OVERRIDES, "training.steps=20000", *SHAPE, *HARVEST, here)
    run.wait_for_step(2, LIMIT_S)
    wait_until("both replicas answer", lambda: replicas(run) == 2, LIMIT_S)
    lines = login.call("mrl", "status", run.dir.root).stdout
    assert "infer-1" in lines

    login.take(jobs(run, "%N"))
    wait_until("one is gone", lambda: replicas(run) == 1, LIMIT_S)
    wait_until("another has come", lambda: replicas(run) == 2, LIMIT_S)

    login.call("mrl", "cancel", "--drain", run.dir.root)
    run.wait("COMPLETED")
    steps = run.metrics()
    assert run.ends() == [("stopped", "cancelled")], run.log()
    assert [line["first_ordinal"] for line in steps[1:]] == [line["next_ordinal"] for line in steps[:-1]]
    assert max(line["staleness_max"] for line in steps) == 0

    wait_until("their jobs end with the run", lambda: not jobs(run, "%A"), LIMIT_S)
