"""Tests with the real vLLM. They run where MRL_VLLM_PYTHON names an interpreter that has it: `make test-vllm`."""

from __future__ import annotations

from pathlib import Path

import pytest
from optional import mark_real
from vllm_front import PYTHON_VARIABLE

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_real(items, HERE, "vllm", PYTHON_VARIABLE)
