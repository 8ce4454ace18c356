"""A rank starts without what it does not need: torch's compilers, which megatron-core and torch's optimizers would load,
and packages that only a few runs use."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from core_helpers import full_forward, tiny_model, tiny_policy

from megatron_rl.model.platform import megatron_core


@pytest.mark.parametrize("options", [{}, {"dynamic": True}])
def test_functions_of_megatron_core_are_compiled_at_their_first_call(monkeypatch, options) -> None:
    compiled = []

    def compile_(function, **given):
        compiled.append((function, given))
        return lambda *values: ("compiled", function(*values))

    def add(one: int, other: int) -> int:
        """Adds."""
        return one + other

    monkeypatch.setattr(megatron_core, "_compile", compile_)
    decorate = megatron_core._compiled_when_called
    later = decorate(**options)(add) if options else decorate(add)
    assert (compiled, later.__doc__) == ([], "Adds.")
    assert [later(1, 2), later(3, 4)] == [("compiled", 3), ("compiled", 7)]
    assert compiled == [(add, options)]


def test_a_pass_through_experts_compiles_nothing(platform: Any, groups: Any, monkeypatch) -> None:
    def compile_(function, **_):
        raise AssertionError(f"{function.__qualname__} would be compiled")

    monkeypatch.setattr(megatron_core, "_compile", compile_)
    model = tiny_model(num_experts=4, experts_per_token=2, expert_ffn_hidden_size=24)
    full_forward(tiny_policy(platform, model), [1, 2, 3])


def test_the_engine_of_megatron_core_does_not_load_wandb() -> None:
    from megatron_rl.generate.engine.megatron_parts import DynamicInferenceEngine

    assert not sys.modules[DynamicInferenceEngine.__module__].HAVE_WANDB


PROGRAM = """
import sys
import megatron_rl.run.attempt, torch
for kind in (torch.optim.Adam, torch.optim.AdamW):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([weight], lr=0.5)
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    assert weight.grad is None and float(weight[0].detach()) < 1 and torch.is_grad_enabled()
print(*sys.modules)
"""
UNUSED = {
    *("torch._dynamo", "torch._inductor", "triton", "tensorboard", "httpx", "wandb", "transformers", "datasets"),
    *("fastapi", "uvicorn", "openai", "vllm", "rich"),
}


def test_a_rank_that_has_updated_its_weights_has_loaded_no_compiler_and_no_client() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert not {*done.stdout.split()} & UNUSED
