"""Tests with the real vLLM. They run where MRL_VLLM_PYTHON names an interpreter that has it: `make test-vllm`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from vllm_front import PYTHON_VARIABLE

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason=f"{PYTHON_VARIABLE} names no Python with vLLM: `make test-vllm` installs one")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.vllm)
            if not os.environ.get(PYTHON_VARIABLE):
                item.add_marker(missing)
