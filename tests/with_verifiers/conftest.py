"""Tests with the real verifiers. They run where MRL_VERIFIERS_PYTHON names an interpreter that has it: `make
test-verifiers`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from optional import mark_real

PYTHON_VARIABLE = "MRL_VERIFIERS_PYTHON"
HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "verifiers"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_real(items, HERE, "verifiers", PYTHON_VARIABLE)


@pytest.fixture
def verifiers_python(monkeypatch: pytest.MonkeyPatch) -> str:
    """The interpreter with verifiers, which finds the environments of the tests and the examples."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [HERE / "packages", EXAMPLES / "running_sum"])))
    return os.environ[PYTHON_VARIABLE]
