"""A run whose Adam state is in host memory except during updates has the same record, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loop_helpers import Attempt, lines_of, loop_recipe, prepare, reproducible

from megatron_rl.contract.paths import RunDir

LAYOUTS: list[dict[str, Any]] = [{"tp": 2, "sequence_parallel": True}, {"tp": 2}, {"pp": 2}]


@pytest.mark.slow  # test_drain_phases.py shows it for data parallel ranks in fp32
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_run_with_offload_equals_the_run_without(layout: dict[str, Any], tmp_path: Path) -> None:
    """The run has evaluations and checkpoints between its steps, and is in bf16, where Adam has its own weights."""

    def run(offload: str) -> RunDir:
        recipe = loop_recipe(
            model={"dtype": "bf16"},
            placement={"training": layout, "offload": offload},
            training={"steps": 3},
            evaluation={"every": 2},
            save={"every": 2},
        )
        run_dir = prepare(tmp_path / offload, recipe)
        attempt = Attempt(run_dir, tmp_path / "cache")
        assert attempt.exit_codes() == [0, 0], attempt.logs()
        return run_dir

    usual, offloaded = run("none"), run("optimizer")
    assert reproducible(offloaded) == reproducible(usual)
    assert all(line["system/offloaded_bytes"] > 0 for line in lines_of(offloaded.metrics))
