"""Profiles of steps: chosen steps, ranks and parts alone, and a failure that leaves the run alone."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from megatron_rl.contract.paths import RunDir
from megatron_rl.platform.cpu import CpuPlatform
from megatron_rl.rank.config import LONGEST_PROFILE, ProfileConfig
from megatron_rl.rank.profiler import StepProfiler


def profiled(folder: Path, rank: int, config: ProfileConfig | None) -> list[str]:
    """Names of the files after four steps."""
    attempt = RunDir(folder).attempt(1)
    profiler = StepProfiler(attempt, rank, config, CpuPlatform(threads=1))
    for step in range(1, 5):
        for role in ("generate", "train"):
            with profiler.part(role, step):
                torch.ones(8, 8) @ torch.ones(8, 8)
    return sorted(path.name for path in attempt.profile.glob("*")) if attempt.profile.exists() else []


def test_traces_are_of_the_chosen_steps_and_ranks(tmp_path: Path) -> None:
    config = ProfileConfig(steps=[2, 3])
    assert profiled(tmp_path, 0, config) == ["train.0.step-000002.json.gz", "train.0.step-000003.json.gz"]
    assert profiled(tmp_path / "b", 1, config) == []
    assert profiled(tmp_path / "c", 1, ProfileConfig(steps=[2, 2], ranks=None)) == ["train.1.step-000002.json.gz"]
    assert profiled(tmp_path / "d", 0, None) == []
    trace = json.loads(
        gzip.decompress((RunDir(tmp_path).attempt(1).profile / "train.0.step-000002.json.gz").read_bytes())
    )
    assert "aten::matmul" in {event.get("name") for event in trace["traceEvents"]}
    assert "[memory]" in {event.get("name") for event in trace["traceEvents"]}


def test_generation_is_profiled_if_it_is_asked_for(tmp_path: Path) -> None:
    config = ProfileConfig(steps=[4, 4], generation=True)
    assert profiled(tmp_path, 0, config) == ["generate.0.step-000004.json.gz", "train.0.step-000004.json.gz"]


def test_a_profile_that_cannot_be_written_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "attempts").write_text("")
    with caplog.at_level(logging.WARNING):
        profiler = StepProfiler(RunDir(tmp_path).attempt(1), 0, ProfileConfig(steps=[1, 1]), CpuPlatform(threads=1))
        with profiler.part("train", 1):
            torch.ones(2)
    assert "is left out" in caplog.text


def test_an_error_of_the_step_is_not_hidden(tmp_path: Path) -> None:
    profiler = StepProfiler(RunDir(tmp_path).attempt(1), 0, ProfileConfig(steps=[1, 1]), CpuPlatform(threads=1))
    with pytest.raises(ZeroDivisionError), profiler.part("train", 1):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([3, 2], "ends before it begins"),
        ([1, LONGEST_PROFILE + 1], f"profile at most {LONGEST_PROFILE}"),
        ([0, 2], "greater than 0"),
        ([1], "at least 2 items"),
    ],
)
def test_nonsense_is_refused(steps: list[int], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        ProfileConfig(steps=steps)
