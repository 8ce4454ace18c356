"""A rehearsal reports what a phase of the step raises; any other exception is a fault of the rehearsal."""

from __future__ import annotations

import pytest

from megatron_rl.learn.training.schedule import Pipeline
from megatron_rl.model.platform.phantom import HeldMemory, PhantomDevice
from megatron_rl.run.rehearse import rank
from megatron_rl.run.rehearse.rank import PhaseFailed, Phases


def test_the_innermost_phase_is_reported() -> None:
    phases = Phases(HeldMemory())
    with pytest.raises(PhaseFailed) as failed, phases.phase("train"), phases.phase("update"):
        Pipeline().not_there  # noqa: B018
    assert failed.value.failure["phase"] == "update"
    assert failed.value.failure["error"].startswith("AttributeError: ")
    assert phases.peaks == {}


def test_a_fault_outside_the_phases_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*given: object) -> None:
        raise ValueError("of ours")

    monkeypatch.setattr(rank, "_Rank", faulty)
    with pytest.raises(ValueError, match="of ours"):
        rank.rehearse_rank(None, 8, "colocated", None, PhantomDevice())
