"""Inference replicas in their own jobs on nodes that others may take at any time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab import wait_until
from login import Login, Run
from loop_helpers import Attempt, prepare
from records import OVERRIDES, record

from launcher.recipe.load import load_recipe

SHAPE = ("placement.mode=partitioned", "job.nodes=2", "job.gpus_per_node=1", "placement.inference.nodes=1")
LIMIT_S = 300.0


def replicas(run: Run) -> int:
    """Number of replicas that answer, by the newest step."""
    return int(run.metrics()[-1]["system/replicas"])


def jobs(run: Run, what: str) -> str:
    name = f"{run.dir.root.name}-harvest-{json.loads(run.dir.identity.read_text())['id'][:8]}"
    return run.lab.run("squeue", "--noheader", f"--name={name}", f"--format={what}").strip()


def submit(login: Login, most: int, *words: str) -> Run:
    """Submit a run with one replica in its job and `most` harvested ones, and wait until all answer."""
    login.profiles["real"] |= {
        "partition": "high",
        "health_check": False,
        "environment": {"MRL_CACHE": str(login.lab.cache)},
    }
    login.confine(1, 3 + most)
    here = "harvest.sbatch=" + json.dumps(login.profiles["real"]["sbatch"])
    harvest = ("harvest.partition=low", f"harvest.max_replicas={most}", here)
    run = login.submit("demo", "--cluster", "real", *OVERRIDES, "training.steps=20000", *SHAPE, *words, *harvest)
    run.wait_for_step(2, LIMIT_S)
    wait_until("all replicas answer", lambda: replicas(run) == 1 + most, LIMIT_S)
    return run


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_replacing_three_harvested_replicas_leaves_the_record_unchanged(login: Login, tmp_path: Path) -> None:
    """Each of their nodes is taken away in turn, and given back."""
    plain = ("optimizer.decay=constant", "evaluation.every=0")  # nothing depends on when the run ends
    run = submit(login, 3, *plain)
    for taken in jobs(run, "%N").split():
        urgent = login.take(taken)
        wait_until(f"the one on {taken} is gone", lambda: replicas(run) < 4, LIMIT_S)
        login.lab.run("scancel", urgent)
        wait_until("another has come", lambda: replicas(run) == 4, LIMIT_S)
    login.call("mrl", "cancel", "--drain", run.dir.root)
    run.wait("COMPLETED")
    steps, _ = record(run.dir)

    here = ("job.nodes=1", f"training.steps={len(steps)}", *plain)
    alone = Attempt(
        prepare(tmp_path / "alone", load_recipe("demo", [*OVERRIDES, *here]).config.model_dump()), login.lab.cache, 1
    )
    assert alone.exit_codes(LIMIT_S) == [0], alone.logs()
    assert steps == record(alone.run_dir)[0]
