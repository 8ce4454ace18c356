"""Tests with real agent frameworks. They run where MRL_CLIENTS_PYTHON names an interpreter that has them: `make
test-clients`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from optional import mark_real

PYTHON_VARIABLE = "MRL_CLIENTS_PYTHON"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_real(items, Path(__file__).parent, "clients", PYTHON_VARIABLE)


@pytest.fixture
def clients_python() -> str:
    return os.environ[PYTHON_VARIABLE]
