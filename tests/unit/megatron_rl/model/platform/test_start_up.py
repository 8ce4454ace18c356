"""Functions that megatron-core compiles at import are compiled at their first call, which halves a rank's start."""

from __future__ import annotations

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
