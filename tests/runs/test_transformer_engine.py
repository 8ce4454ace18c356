"""In an image that has Transformer Engine a run is made of the same modules as anywhere else, on a CPU too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

STUB = '''
"""Transformer Engine 2.4 as far as megatron-core looks at it: all can be imported, nothing works without CUDA."""
import importlib, importlib.abc, importlib.machinery, sys, types

__version__ = "2.4.0"
__path__ = []


def _needs_cuda(self, *args, **kwargs):
    raise RuntimeError("Transformer Engine needs CUDA")


def _name(module, name):
    if name.startswith("__"):
        raise AttributeError(name)
    if name in ("ops", "recipe"):
        return importlib.import_module(f"{module.__name__}.{name}")
    import torch
    base = torch.optim.Optimizer if name.startswith("Fused") else torch.nn.Module
    return type(name, (base,), {"__init__": _needs_cuda})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.startswith("transformer_engine."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _name(module, name)
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())
common = importlib.import_module("transformer_engine.common")
'''

PROGRAM = """
import json
import megatron_rl.attempt  # as a rank does
import torch, torch.distributed as dist
from megatron.core import parallel_state
from core_helpers import VOCAB, tiny_model
from megatron_rl.model.policy import build_policy
from megatron_rl.platform.attention import whole_sequences
from megatron_rl.platform.select import select
from megatron_rl.rank.config import JobConfig
from megatron_rl.training.config import OptimizerConfig
from megatron_rl.training.optimizer import PolicyOptimizer

platform = select(JobConfig(device="cpu"))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
platform.seed(1)
policy = build_policy(tiny_model(), VOCAB, platform)
optimizer = PolicyOptimizer(policy, tiny_model(), OptimizerConfig(learning_rate=1e-3), 10)
optimizer.zero_grad()
layout = policy.layout(whole_sequences([4]))
optimizer.ddp(torch.arange(4), torch.arange(4), layout).logsumexp(-1).sum().backward()
applied = optimizer.update(0).applied
model = policy.sharded_state_dict()
print(json.dumps({
    "norm": type(policy.decoder.final_layernorm).__module__,
    "adam": type(optimizer._parts()[0].optimizer).__module__,
    "applied": applied,
    "keys": sorted([*model, *optimizer.sharded_state(model)]),
}))
import transformer_engine
"""


def run(path: str) -> tuple[dict[str, object], str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done.stderr


def test_modules_and_checkpoint_are_the_same_with_and_without_transformer_engine(tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(STUB)
    helpers = str(Path(__file__).parents[1] / "helpers")
    without, missing = run(helpers)
    beside, said = run(f"{tmp_path}:{helpers}")
    assert "No module named 'transformer_engine'" in missing
    assert said == "", "who asks for it later finds it"
    assert beside == without
    assert without["norm"].startswith("megatron_rl.") and without["adam"].startswith("torch.")
    assert without["applied"]
