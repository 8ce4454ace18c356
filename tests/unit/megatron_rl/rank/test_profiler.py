"""Profiles of steps: chosen steps, ranks and parts alone, and a failure that leaves the run alone."""

from __future__ import annotations

import gzip
import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from launcher.recipe.load import load_recipe
from megatron_rl.contract.paths import RunDir
from megatron_rl.model.platform.cpu import CpuDevice
from megatron_rl.rank.profiler import GenerationProfiler, StepProfiler, generation_profiler
from megatron_rl.recipe.job import LONGEST_PROFILE, PLANS, ProfileConfig


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


def events(trace: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def profiled(folder: Path, rank: int, config: ProfileConfig | None) -> list[str]:
    """Names of the files after four steps."""
    attempt = RunDir(folder).attempt(1)
    profiler = StepProfiler(attempt, rank, config, CpuDevice(threads=1))
    for step in range(1, 5):
        with profiler.training(step):
            torch.ones(8, 8) @ torch.ones(8, 8)
    return written(attempt.profile)


def test_traces_are_of_the_chosen_steps_and_ranks(tmp_path: Path) -> None:
    config = ProfileConfig(steps=[2, 3])
    assert profiled(tmp_path, 0, config) == ["train.0.step-000002.json.gz", "train.0.step-000003.json.gz"]
    assert profiled(tmp_path / "b", 1, config) == []
    assert profiled(tmp_path / "c", 1, ProfileConfig(steps=[2, 2], ranks=None)) == ["train.1.step-000002.json.gz"]
    assert profiled(tmp_path / "d", 0, None) == []
    found = {event.get("name") for event in events(RunDir(tmp_path).attempt(1).profile / "train.0.step-000002.json.gz")}
    assert {"aten::matmul", "[memory]"} <= found


def generated(profiler: GenerationProfiler, *plans: tuple[int, int]) -> None:
    """Execute plans: a policy version and how many of its plans, which are products of matrices."""
    for version, count in plans:
        for _ in range(count):
            with profiler.plan(version):
                torch.ones(8, 8) @ torch.ones(8, 8)


def products(trace: Path) -> int:
    return sum(event.get("name") == "aten::mm" for event in events(trace))


def test_a_trace_of_generation_is_of_the_first_plans_of_a_step(tmp_path: Path) -> None:
    profiler = GenerationProfiler(tmp_path, "infer-0.1", [2, 3], 2, CpuDevice(threads=1))
    generated(profiler, (0, 2), (1, 1), (2, 2 * PLANS), (3, 3), (4, 3))
    assert written(tmp_path) == ["infer-0.1.step-000002.json.gz"], "the trace of step 3 has not ended"
    profiler.end()
    assert written(tmp_path) == ["infer-0.1.step-000002.json.gz", "infer-0.1.step-000003.json.gz"]
    assert [products(path) for path in sorted(tmp_path.glob("*"))] == [PLANS, 3]
    generated(profiler, (4, 3), (6, 3))
    profiler.end()
    assert [products(path) for path in sorted(tmp_path.glob("*"))] == [PLANS, 3], "a step is traced once"


@pytest.mark.parametrize(
    ("profile", "traced"),
    [
        (None, []),
        ({"steps": [2, 3], "generation": True, "ranks": [1]}, ["generate.1", "infer-0.0"]),
        (
            {"steps": [2, 3], "generation": True, "ranks": None},
            ["generate.0", "generate.1", "infer-0.0", "infer-0.1", "infer-1.0", "infer-1.1"],
        ),
    ],
)
def test_generation_is_profiled_if_it_is_asked_for(tmp_path: Path, profile: Any, traced: list[str]) -> None:
    config = load_recipe("demo", [f"profile={json.dumps(profile)}"]).config
    attempt = RunDir(tmp_path).attempt(1)
    for replica in (None, 0, 1):
        for rank in (0, 1):
            profiler = generation_profiler(attempt, config, CpuDevice(threads=1), rank, replica)
            generated(profiler, (0, 1), (1, 1), (2, 1), (3, 1))
            profiler.end()
    assert written(attempt.profile) == [f"{name}.step-{step:06d}.json.gz" for name in traced for step in (2, 3)]


def test_a_profile_that_cannot_be_written_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "attempts").write_text("")
    attempt = RunDir(tmp_path).attempt(1)
    with caplog.at_level(logging.WARNING):
        with StepProfiler(attempt, 0, ProfileConfig(steps=[1, 1]), CpuDevice(threads=1)).training(1):
            torch.ones(2)
        profiler = GenerationProfiler(attempt.profile, "generate.0", [1], 1, CpuDevice(threads=1))
        generated(profiler, (0, 1))
        profiler.end()
    assert caplog.text.count("is left out") == 2


class BrokenPlatform(CpuDevice):
    """A device whose history of memory cannot be read, as where another tool profiles it."""

    def watch_memory(self, watch: bool) -> None:
        raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")


def test_a_profiler_that_fails_does_not_fail_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attempt, done = RunDir(tmp_path).attempt(1), []
    with caplog.at_level(logging.WARNING):
        with StepProfiler(attempt, 0, ProfileConfig(steps=[1, 1]), BrokenPlatform(threads=1)).training(1):
            done.append(1)
        with (
            suppress(RuntimeError),  # torch 2.11 lets the inner profiler end the outer one
            torch.profiler.profile(),
            StepProfiler(attempt, 0, ProfileConfig(steps=[1, 1]), CpuDevice(threads=1)).training(1),
        ):
            done.append(2)
    assert done == [1, 2]
    assert "MULTIPLE_SUBSCRIBERS" in caplog.text


def test_an_error_of_the_step_is_not_hidden(tmp_path: Path) -> None:
    profiler = StepProfiler(RunDir(tmp_path).attempt(1), 0, ProfileConfig(steps=[1, 2]), CpuDevice(threads=1))
    with pytest.raises(ZeroDivisionError), profiler.training(1):
        raise ZeroDivisionError
    with profiler.training(2):
        torch.ones(2)
    assert written(RunDir(tmp_path).attempt(1).profile) == ["train.0.step-000002.json.gz"]


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([3, 2], "ends before it begins"),
        ([1, LONGEST_PROFILE + 1], f"profile at most {LONGEST_PROFILE}"),
    ],
)
def test_nonsense_is_refused(steps: list[int], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        ProfileConfig(steps=steps)
