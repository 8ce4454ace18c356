"""The front of a vLLM replica, and what vLLM's processes import of the project, need no megatron-core, which vLLM's
environment does not have."""

from __future__ import annotations

import subprocess
import sys

MODULES = (
    "megatron_rl.replica_main",
    "megatron_rl.generate.replica.lifecycle",
    "megatron_rl.generate.refit.probe",
    "megatron_rl.generate.refit.bucket_receiver",
    "megatron_rl.generate.refit.transfer",
    "megatron_rl.generate.vllm.replica",
    "megatron_rl.generate.vllm.share",
)
PROGRAM = """
import importlib, sys

class WithoutMegatron:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            raise ImportError(f"{name} is imported")

sys.meta_path.insert(0, WithoutMegatron())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_modules_import_without_megatron_core() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *MODULES], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
