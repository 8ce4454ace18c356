"""Fixtures for tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def no_clusters_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use no clusters.yaml except the shipped one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("MRL_CLUSTERS", "MRL_CLUSTER", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
