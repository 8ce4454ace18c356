"""What a rank loads before it can begin: not what only some runs need, for that is half of the time it takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_rl.platform import megatron_core


def test_a_rank_loads_neither_compilers_nor_wandb_which_can_still_be_imported() -> None:
    names = ["megatron.core", "torch._inductor", "torch._dynamo", "wandb", "transformers"]
    names.append("megatron_rl.platform.cpu")  # its patches are for recipes that ask for a CPU
    program = (
        "import sys, importlib.util, megatron_rl.attempt\n"
        f"print(*[name for name in {names} if name in sys.modules], importlib.util.find_spec('wandb').name)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout.split() == ["megatron.core", "wandb"]
    assert done.stderr == "", "the first lines of every log would be warnings that nobody can do anything about"


@pytest.mark.parametrize("options", [{}, {"dynamic": True}])
def test_what_megatron_core_has_compiled_is_compiled_when_it_is_called(monkeypatch, options) -> None:
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
