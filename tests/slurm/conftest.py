"""A real Slurm for the tests of this directory: brought up once a session, gone with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Cluster, missing
from login import Login, Run
from records import RECIPE, finish, hold


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slurm's own timing wanders by seconds, on a busy machine by more: a test of this directory that fails is run once
    more, and pytest's last line says so."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.flaky(reruns=1))


def require(accounting: bool = False) -> None:
    """Skips with the reason where Slurm is not installed; fails where it has to be (.ci/run)."""
    if (reason := missing(accounting)) is not None:
        if os.environ.get("MRL_REQUIRE_SLURM"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def lab() -> Iterator[Cluster]:
    """Ten nodes without accounting. MRL_LAB_ISOLATION=uts: as where networks are not permitted."""
    require()
    yield from brought_up(Cluster(isolation=os.environ.get("MRL_LAB_ISOLATION")))


@pytest.fixture(scope="module")
def accounting_lab() -> Iterator[Cluster]:
    """Two nodes whose jobs slurmdbd remembers."""
    require(accounting=True)
    yield from brought_up(Cluster(nodes=2, accounting=True))


@pytest.fixture(scope="module")
def forgetful_lab() -> Iterator[Cluster]:
    """Two nodes whose jobs only the controller remembers; a test may make it forget them."""
    require()
    yield from brought_up(Cluster(nodes=2))


def brought_up(cluster: Cluster) -> Iterator[Cluster]:
    try:
        yield cluster.up()
    finally:
        cluster.down()


@pytest.fixture
def login(lab: Cluster, tmp_path: Path) -> Iterator[Login]:
    """A user with an empty home and an empty shared directory; their jobs end with the test."""
    user = Login(lab, tmp_path / "home", tmp_path / "share")
    yield user
    if user.jobs:
        lab.run("scancel", "--quiet", *user.jobs)


@pytest.fixture(scope="session")
def undisturbed(lab: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of records.RECIPE that nothing happens to."""
    root = tmp_path_factory.mktemp("undisturbed")
    login = Login(lab, root / "home", root / "share")
    hold(login)  # nowhere
    run = login.submit(*RECIPE)
    finish(run)
    return run
