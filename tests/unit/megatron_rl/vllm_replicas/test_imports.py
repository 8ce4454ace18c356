"""Imports of the front of a vLLM replica, and of the project's code in vLLM's processes: no megatron-core, which vLLM's
environment does not have, and in the front no torch, whose import would delay the start by a second and a half."""

from __future__ import annotations

import subprocess
import sys

import pytest

OF_THE_FRONT = (
    "megatron_rl.replica_main",
    "megatron_rl.generate.replica.lifecycle",
    "megatron_rl.generate.vllm.replica",
    "megatron_rl.generate.vllm.teacher",
)
OF_WORKERS = (
    "megatron_rl.generate.refit.probe",
    "megatron_rl.generate.refit.bucket_receiver",
    "megatron_rl.generate.refit.transfer",
    "megatron_rl.generate.vllm.share",
)
PROGRAM = """
import importlib, sys

absent = sys.argv[1].split(",")

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ImportError(f"{name} is imported")

sys.meta_path.insert(0, Without())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


@pytest.mark.parametrize(("modules", "absent"), [(OF_THE_FRONT, "megatron,torch"), (OF_WORKERS, "megatron")])
def test_modules_import_without_what_they_do_not_need(modules: tuple[str, ...], absent: str) -> None:
    command = [sys.executable, "-c", PROGRAM, absent, *modules]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
