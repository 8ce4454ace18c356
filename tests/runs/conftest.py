"""Fixtures of whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MRL_CACHE of runs: a base model is taught by the first run that needs it, and read by the others."""
    return tmp_path_factory.mktemp("cache")
