"""Training with answers from a replica on another node has the record of ranks that train and generate, also after
faults of either side."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from lab import Cluster
from login import Login, Run
from loop_helpers import Attempt, prepare
from records import OVERRIDES, finish, preempt, record

from launcher.recipe.load import load_recipe
from megatron_rl.contract.paths import RunDir

SHORT = (*OVERRIDES, "training.steps=8", "job.nodes=3")
APART = ("job.nodes=4", "placement.mode=partitioned", "placement.inference.nodes=1")
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def colocated(lab: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], RunDir]]:
    """Co-located run on the same number of training ranks. It starts with the tests; the call waits for its end."""
    root = tmp_path_factory.mktemp("colocated") / "run"
    run = prepare(root, load_recipe("demo", SHORT).config.model_dump())
    attempt = Attempt(run, lab.cache, ranks=3)

    def finished() -> RunDir:
        assert attempt.exit_codes() == [0, 0, 0], attempt.logs()
        return run

    yield finished
    for process in attempt.processes:
        process.kill()


def submit(login: Login) -> Run:
    """Submit a partitioned run, and wait until it has trained two steps."""
    login.profiles["real"] |= {"health_check": False, "environment": {"MRL_CACHE": str(login.lab.cache)}}
    run = login.submit("demo", "--cluster", "real", *SHORT, *APART)
    run.wait_for_step(2, LIMIT_S)
    return run


@pytest.mark.slow
def test_preempted_partitioned_run_resumes_with_the_record_unchanged(
    login: Login, colocated: Callable[[], RunDir]
) -> None:
    run = submit(login)
    preempt(login, run)
    finish(run)
    assert run.ends() == [("drained", "preempted"), ("finished", None)]
    assert record(run.dir) == record(colocated())
