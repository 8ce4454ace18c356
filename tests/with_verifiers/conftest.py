"""Tests with the real verifiers. They run where MRL_VERIFIERS_PYTHON names an interpreter that has it: `make
test-verifiers`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PYTHON_VARIABLE = "MRL_VERIFIERS_PYTHON"
HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "verifiers"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason=f"{PYTHON_VARIABLE} names no Python with verifiers: `make test-verifiers`")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.verifiers)
            if not os.environ.get(PYTHON_VARIABLE):
                item.add_marker(missing)


@pytest.fixture
def verifiers_python(monkeypatch: pytest.MonkeyPatch) -> str:
    """The interpreter with verifiers, which finds the environments of the tests and the examples."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [HERE / "packages", EXAMPLES / "running_sum"])))
    return os.environ[PYTHON_VARIABLE]
