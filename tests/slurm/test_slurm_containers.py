"""Runs in real containers, by pyxis and enroot: their records are those of ranks without containers, also after faults.

MRL_PYXIS names pyxis's plugin, spank_pyxis.so, and MRL_IMAGE an image with what the ranks need (CONTRIBUTING.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Cluster
from login import Login, Run
from records import OVERRIDES, finish, kill_rank, preempt, record, wait_for_ends

from launcher.host.record.evidence import read_replicas
from megatron_rl.contract.paths import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

LIMIT_S = 600.0
"""Limit of a wait for an image of a gigabyte to be unpacked or removed."""


@pytest.fixture(scope="session")
def lab() -> Iterator[Cluster]:
    """Two nodes with the real pyxis."""
    if not (plugin := os.environ.get("MRL_PYXIS")) or "MRL_IMAGE" not in os.environ:
        pytest.skip("MRL_PYXIS and MRL_IMAGE name no plugin and image")
    cluster = Cluster(nodes=2, pyxis=Path(plugin))
    try:
        yield cluster.up()
    finally:
        cluster.down()


def submit(login: Login, *overrides: str) -> Run:
    """Submit a run in containers, and wait until it has trained two steps."""
    del login.profiles["real"]["python"]  # the image has its own
    login.profiles["real"] |= {
        "container": {"image": os.environ["MRL_IMAGE"], "mounts": [f"{login.lab.cache}:{login.lab.cache}"]},
        "environment": {"MRL_CACHE": str(login.lab.cache)},
    }
    login.lab.cache.mkdir(exist_ok=True)
    run = login.submit("demo", "--cluster", "real", *OVERRIDES, *overrides)
    run.wait_for_step(2, LIMIT_S)
    return run


def containers(lab: Cluster) -> list[str]:
    """Unpacked containers on all nodes."""
    return [file.name for file in lab.directory.glob("spool/*.enroot/*")]


def test_preempted_run_whose_rank_was_killed_has_the_record_of_an_undisturbed_one(
    login: Login, undisturbed: RunDir
) -> None:
    run = submit(login)
    preempted = preempt(login, run)
    wait_for_ends(run, 1)
    login.lab.run("scancel", preempted)
    run.wait_for_step(len(run.metrics()) + 1, LIMIT_S)
    assert kill_rank(run, 1)
    finish(run)
    assert record(run.dir) == record(undisturbed)
    outcomes = [outcome for outcome, _ in run.ends()]
    assert outcomes == ["drained", "crashed", "finished"], run.log()
    assert containers(login.lab) == []


def test_killed_replica_starts_again_in_the_container_of_its_node(login: Login) -> None:
    run = submit(login, "placement.mode=partitioned", "placement.inference.nodes=1", "training.steps=20")
    assert kill_rank(run, 0, "infer-0")
    finish(run)
    (replica,) = read_replicas(run.dir.attempt(1))
    assert replica.starts == 2, run.log()
    assert containers(login.lab) == []
