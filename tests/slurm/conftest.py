"""A real Slurm for the tests of this directory, which starts and ends with the session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Cluster, missing
from login import Login
from records import OVERRIDES

from launcher.recipe.load import load_recipe
from megatron_rl.contract.paths import RunDir


def require(accounting: bool = False) -> None:
    """Skip the test if Slurm is not installed; fail it if .ci/run requires Slurm."""
    if (reason := missing(accounting)) is not None:
        if os.environ.get("MRL_REQUIRE_SLURM"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def lab() -> Iterator[Cluster]:
    """Ten nodes without accounting. MRL_LAB_ISOLATION=uts makes them share this machine's network."""
    require()
    yield from brought_up(Cluster(isolation=os.environ.get("MRL_LAB_ISOLATION")))


@pytest.fixture(scope="session")
def accounting_lab() -> Iterator[Cluster]:
    """Two nodes with an accounting database."""
    require(accounting=True)
    yield from brought_up(Cluster(nodes=2, accounting=True))


@pytest.fixture(scope="module")
def forgetful_lab() -> Iterator[Cluster]:
    """Two nodes without accounting, whose controller a test may make forget its jobs."""
    require()
    yield from brought_up(Cluster(nodes=2))


def brought_up(cluster: Cluster) -> Iterator[Cluster]:
    try:
        yield cluster.up()
    finally:
        cluster.down()


@pytest.fixture(scope="module")
def owner(lab: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Login]:
    """A user whose runs all tests of a file share."""
    folder = tmp_path_factory.mktemp("owner")
    with Login(lab, folder / "home", folder / "share") as user:
        yield user


@pytest.fixture
def login(lab: Cluster, tmp_path: Path) -> Iterator[Login]:
    """A user with an empty home and shared directory, whose jobs end with the test."""
    with Login(lab, tmp_path / "home", tmp_path / "share") as user:
        yield user


@pytest.fixture(scope="session")
def undisturbed(lab: Cluster, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """An undisturbed run of records.OVERRIDES on this machine, without Slurm."""
    from loop_helpers import Attempt, prepare  # imports torch

    folder = tmp_path_factory.mktemp("undisturbed")
    run_dir = prepare(folder / "run", load_recipe("demo", OVERRIDES).config.model_dump())
    attempt = Attempt(run_dir, lab.cache)
    assert attempt.exit_codes() == [0, 0], attempt.logs()
    return run_dir
