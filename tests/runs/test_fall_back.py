"""A start that cannot read the newest checkpoint falls back to an earlier one, and the run ends with the record of an
undisturbed one, although a later start can read the newest one again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulated_run import Simulation, recipe

from megatron_rl.contract import manifest as manifest_module
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.records import Lines, read_lines

AFTER_TWO_SAVES, AT_ONCE = 23, 3
"""Looks at the drain flag at which an attempt is asked to leave."""


def recorded_steps(run: Simulation) -> list[int]:
    found = read_lines(MetricsLine, run.run_dir.metrics)
    assert isinstance(found, Lines)
    return [line.step for line in found.records]


def test_a_run_never_returns_to_a_checkpoint_from_which_its_record_was_cut_back(
    tmp_path: Path, platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_module, "CHECK_AGAIN_S", 0.0)
    config = recipe(dynamic=False)
    config = config.model_copy(update={"save": config.save.model_copy(update={"keep": 2, "every": 1})})
    undisturbed = Simulation(tmp_path / "undisturbed", config, platform, groups)
    assert undisturbed.attempt() == "finished"

    run = Simulation(tmp_path / "run", config, platform, groups)
    assert run.attempt(ask_at=AFTER_TWO_SAVES) == "drained"
    assert run.run_dir.checkpoint_steps() == [3, 2]
    shard = run.run_dir.checkpoint(3) / "__0_0.distcp"
    hidden = shard.rename(shard.with_name("hidden"))
    assert run.attempt(ask_at=AT_ONCE, left_s=0.0) == "drained"
    assert recorded_steps(run) == [1, 2], "it has fallen back, and had no time to save"

    aside = run.run_dir.passed_over_checkpoint(3)
    (aside / hidden.name).rename(aside / shard.name)
    assert run.attempt() == "finished"
    assert recorded_steps(run) == [1, 2, 3, 4]
    assert run.record() == undisturbed.record()
    assert run.run_dir.passed_over_steps() == []
