"""The front of a vLLM replica, and what vLLM's processes import of the project, need no megatron-core, which vLLM's
environment does not have."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = (
    "megatron_rl.replica_main",
    "megatron_rl.replica.serve",
    "megatron_rl.refit.probe",
    "megatron_rl.refit.transfer",
    "megatron_rl.vllm.replica",
    "megatron_rl.vllm.share",
)
PROGRAM = """
import importlib, sys

class WithoutMegatron:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            raise ImportError(f"{name} is imported")

sys.meta_path.insert(0, WithoutMegatron())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize("name", MODULES)
def test_module_imports_without_megatron_core(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, name], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
