"""A rank does not import modules at its start that only some runs need, which would double its start-up time."""

from __future__ import annotations

import subprocess
import sys


def test_rank_starts_without_importing_compilers_or_wandb() -> None:
    names = ["megatron.core", "torch._inductor", "torch._dynamo", "wandb", "transformers"]
    names.append("megatron_rl.platform.cpu")  # its patches are for recipes that ask for a CPU
    program = (
        "import sys, importlib.util, megatron_rl.run.attempt\n"
        f"print(*[name for name in {names} if name in sys.modules], importlib.util.find_spec('wandb').name)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout.split() == ["megatron.core", "wandb"]
    assert done.stderr == "", "the first lines of every log would be warnings that nobody can do anything about"
