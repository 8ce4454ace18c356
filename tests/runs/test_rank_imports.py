"""A rank imports neither modules at its start that only some runs need, which would double its start-up time, nor an
extension of an image that does not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

UNWANTED = [
    *("torch._inductor", "torch._dynamo", "triton", "tensorboard", "wandb", "transformers", "datasets"),
    *("httpx", "uvicorn", "fastapi", "openai", "rich", "megatron_rl.model.platform.cpu"),
]
if version("megatron-core").startswith("0.16."):  # 0.19 imports them with its own checkpoints
    UNWANTED += ["sympy", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
"""megatron_rl.model.platform.cpu has patches for recipes that ask for a CPU."""

PROGRAM = f"""
import importlib, importlib.util, sys

class Asks:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron.core.dist_checkpointing":
            try:
                importlib.import_module("nvidia_resiliency_ext.checkpointing")
            except ImportError:
                print("hidden")
            else:
                print("found")

sys.meta_path.insert(0, Asks())
import megatron_rl.run.attempt, torch

for kind in (torch.optim.Adam, torch.optim.AdamW):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([weight], lr=0.5)
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    assert weight.grad is None and weight[0].item() < 1 and torch.is_grad_enabled()
if torch.version.cuda or torch.version.hip:
    sys.modules.pop("triton", None)
print(*[name for name in ["megatron.core", *{UNWANTED}] if name in sys.modules], importlib.util.find_spec("wandb").name)
import nvidia_resiliency_ext.checkpointing
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A process with the imports of a rank, beside an older release of the resiliency extension."""
    folder = tmp_path_factory.mktemp("packages")
    package = folder / "nvidia_resiliency_ext"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.4.0'\n")
    (package / "checkpointing.py").touch()
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_rank_starts_and_updates_weights_without_compilers_clients_or_wandb(
    started: subprocess.CompletedProcess[str],
) -> None:
    assert started.stdout.splitlines()[1:] == ["megatron.core wandb"]
    assert started.stderr == "", "the first lines of every log would be warnings that nobody can do anything about"


def test_megatron_core_does_not_find_the_resiliency_extension_of_an_image(
    started: subprocess.CompletedProcess[str],
) -> None:
    """megatron-core 0.19 looks for it while it is imported, and fails beside an older release."""
    assert started.stdout.splitlines()[0] == "hidden"
