"""What megatron-core has compiled where it is imported, which would be half of the time that a rank takes to begin."""

from __future__ import annotations

import pytest

from megatron_rl.platform import megatron_core


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
