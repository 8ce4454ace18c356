"""vLLM's own parser, asked for what it refuses."""

from __future__ import annotations

import os

from vllm_front import PYTHON_VARIABLE

from launcher.backends.probe.vllm_probe import refused_options


def test_the_parser_refuses_what_it_does_not_know() -> None:
    args = {"nonsense-option": 3, "kv-cache-dtype": "fp9", "gpu-memory-utilization": 0.5, "async_scheduling": False}
    found = refused_options(os.environ[PYTHON_VARIABLE], args)
    assert found.keys() == {"nonsense-option", "kv-cache-dtype"}
    assert found["nonsense-option"] == "unrecognized arguments: --nonsense-option=3"
