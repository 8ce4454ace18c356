"""A run whose recipe now has fewer steps than it has trained finishes at once: it trains nothing and warns."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulated_run import STEPS, Simulation, recipe

from megatron_rl.contract.attempt_records import Outcome
from megatron_rl.contract.records import read
from megatron_rl.recipe.config import RunConfig


def given_fewer_steps(run: Simulation, config: RunConfig, steps: int) -> None:
    fewer = config.model_copy(update={"training": config.training.model_copy(update={"steps": steps})})
    run.run_dir.resolved.write_text(yaml.safe_dump(fewer.model_dump(exclude_defaults=True)), encoding="utf-8")


def test_run_beyond_its_last_step_ends_at_once_and_changes_no_record(
    tmp_path: Path, platform: Any, groups: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = recipe(dynamic=False)
    run = Simulation(tmp_path / "run", config, platform, groups)
    assert run.attempt() == "finished"
    metrics, evaluations = run.run_dir.metrics.read_text(), run.run_dir.evaluations.read_text()
    given_fewer_steps(run, config, STEPS - 1)
    with caplog.at_level(logging.WARNING):
        assert run.attempt() == "finished"
    assert (
        f"the checkpoint is of step {STEPS} and training.steps is {STEPS - 1}: nothing is left to train" in caplog.text
    )
    assert read(Outcome, run.run_dir.attempt(2).outcome) == Outcome("finished", STEPS)
    assert (run.run_dir.metrics.read_text(), run.run_dir.evaluations.read_text()) == (metrics, evaluations)
    assert run.run_dir.checkpoint_steps() == [STEPS]
