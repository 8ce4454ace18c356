"""Whole runs of a model split over ranks have the record of a run on one rank, also after interruptions."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from loop_helpers import Attempt, lines_of, loop_recipe, outcome_of, prepare, read_error, reproducible

from launcher.host.record.heartbeats import HangWatch
from megatron_rl.contract.codes import DRAINED, EXIT_CRASHED, EXIT_DRAINED, SILENCE_VARIABLE
from megatron_rl.contract.paths import RunDir

pytestmark = pytest.mark.slow

STEPS = 8
CLOSE = {"rel": 1e-3, "abs": 1e-4}
"""Tolerances: Adam amplifies rounding, since it divides by the size of the gradient."""

TP2 = {"training": {"tp": 2}}
TP2_PP2 = {"training": {"tp": 2, "pp": 2}}
CP2 = {"training": {"cp": 2}}


def recipe(ranks: int, placement: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    taught = {"steps": 120, "batch_size": 16, "learning_rate": 3e-3}
    base = loop_recipe()
    return loop_recipe(
        **{
            "job": {"gpus_per_node": ranks, "collective_timeout_s": 30},
            "model": base["model"] | {"supervised": taught},
            "grpo": {"prompts_per_step": 6, "group_size": 6, "iterations": 2, "importance": {"upper": 2.0}},
            "training": {"steps": STEPS},
            "evaluation": {"every": 4},
            "save": {"every": 2},
            "placement": placement,
            **sections,
        }
    )


def finished(run_dir: RunDir, cache: Path, ranks: int) -> RunDir:
    attempt = Attempt(run_dir, cache, ranks=ranks)
    assert attempt.exit_codes() == [0] * ranks, attempt.logs()
    return run_dir


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> RunDir:
    return finished(prepare(tmp_path_factory.mktemp("runs") / "alone", recipe(1, {})), cache, 1)


def agree(one: RunDir, other: RunDir) -> None:
    """Check that the records agree, except for rounding of sums and the packing of prompts."""
    for ours, theirs in zip(reproducible(one), reproducible(other), strict=True):
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        for mine, yours in zip(ours, theirs, strict=True):
            for line in (mine, yours):
                line.pop("packed_tokens_ratio", None)
            assert mine.pop("dropped_ordinals", None) == yours.pop("dropped_ordinals", None)
            assert mine == pytest.approx(yours, **CLOSE), f"step {mine['step']}"


def test_pipelined_training_and_generation_on_tensor_parallel_ranks_agree_with_one_rank(
    alone: RunDir, tmp_path: Path, cache: Path
) -> None:
    """Although the run is killed, and then asked to leave by way of its driver."""
    run_dir = interrupt(prepare(tmp_path / "interrupted", recipe(4, TP2_PP2)), cache, 4, asked=0)
    agree(finished(run_dir, cache, 4), alone)
    lines = lines_of(run_dir.metrics)
    assert {line["answer_length_max"] for line in lines} <= {1, 2, 3}
    assert max(line["mean_reward"] for line in lines) > 0.1  # otherwise the comparison proves nothing
    assert all(line["system/refit_bytes"] > 0 for line in lines)  # half of the layers, for each rank


@pytest.mark.parametrize(
    ("ranks", "placement"),
    [
        pytest.param(2, TP2, id="TP2", marks=pytest.mark.slow),
        pytest.param(4, TP2, id="TP2 x DP2", marks=pytest.mark.slow),
        pytest.param(4, TP2_PP2 | {"inference": {"tp": 1}}, id="TP2 x PP2 -> TP1", marks=pytest.mark.slow),
        pytest.param(2, {"inference": {"tp": 2}}, id="DP2 -> TP2", marks=pytest.mark.slow),
        pytest.param(2, {"training": {"tp": 2, "sequence_parallel": True}}, id="TP2 SP", marks=pytest.mark.slow),
    ],
)
def test_every_layout_agrees_with_one_rank(
    ranks: int, placement: dict[str, Any], alone: RunDir, tmp_path: Path, cache: Path
) -> None:
    agree(finished(prepare(tmp_path / "run", recipe(ranks, placement)), cache, ranks), alone)


@pytest.mark.slow
def test_expert_parallel_run_agrees_with_one_rank(tmp_path: Path, cache: Path) -> None:
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 32}
    layouts = [(1, {}), (4, {"training": {"tp": 2, "ep": 2, "sequence_parallel": True}})]
    runs = []
    for ranks, placement in layouts:
        of_layout = recipe(ranks, placement)
        of_layout["model"] |= experts
        runs.append(finished(prepare(tmp_path / str(ranks), of_layout), cache, ranks))
    agree(*runs)


def test_dropped_groups_and_rewards_of_drivers_are_counted_once(tmp_path: Path, cache: Path) -> None:
    """One replica trains on the groups of four drivers: all its ranks hold them, one rank counts them, and the rewards
    of all drivers form the baseline."""
    grpo = {"prompts_per_step": 6, "group_size": 4, "baseline": "batch"}
    sections = {
        "grpo": grpo | {"dynamic_sampling": {"enabled": True, "max_rounds": 3}},
        "training": {"steps": 2},
    }
    placement = TP2_PP2 | {"inference": {"tp": 1}}
    runs = [(1, {}), (4, placement)]
    ours, theirs = (
        finished(prepare(tmp_path / str(ranks), recipe(ranks, placement, **sections)), cache, ranks)
        for ranks, placement in runs
    )
    agree(ours, theirs)
    assert any("dropped_ordinals" in line for line in lines_of(ours.metrics))


# Interruptions


def interrupt(run_dir: RunDir, cache: Path, ranks: int, asked: int) -> RunDir:
    """Kill a run, start it again, and ask one of its ranks to leave."""
    killed = Attempt(run_dir, cache, ranks=ranks)
    killed.wait_for_step(3)
    killed.kill()
    drained = Attempt(run_dir, cache, ranks=ranks)
    drained.wait_for_step(5)
    os.kill(drained.processes[asked].pid, signal.SIGUSR1)
    assert drained.exit_codes() == [EXIT_DRAINED] * ranks, drained.logs()
    outcome = outcome_of(drained.files)
    assert outcome is not None
    assert outcome.outcome == DRAINED
    assert lines_of(run_dir.metrics)[-1]["step"] == outcome.step  # no step was trained twice
    return run_dir


def test_context_parallel_run_that_is_interrupted_agrees_with_one_rank(
    alone: RunDir, tmp_path: Path, cache: Path
) -> None:
    """Both ranks are drivers, and each trains on the groups of both. The second is asked to leave."""
    run_dir = interrupt(prepare(tmp_path / "interrupted", recipe(2, CP2)), cache, 2, asked=1)
    agree(finished(run_dir, cache, 2), alone)


# Failures


def test_failing_driver_ends_its_followers_and_reports_first(tmp_path: Path, cache: Path) -> None:
    run_dir = prepare(tmp_path / "failing", recipe(2, TP2))
    attempt = Attempt(run_dir, cache, ranks=2, sabotage=_lose_the_environment)
    assert attempt.exit_codes() == [EXIT_CRASHED] * 2, attempt.logs()
    first, second = (read_error(attempt, rank) for rank in (0, 1))
    assert first["error"].startswith("RuntimeError: the sandbox is gone (")
    assert (second["phase"], second["step"]) == ("waiting for the other ranks", first["step"])
    assert first["at"] < second["at"]


def test_driver_that_waits_long_for_a_reward_is_reported_as_behind(tmp_path: Path, cache: Path) -> None:
    run_dir = prepare(tmp_path / "slow", recipe(2, TP2))
    attempt = Attempt(run_dir, cache, ranks=2, sabotage=_wait_for_ever)
    try:
        hangs = HangWatch(attempt.files, limit=3.0)
        deadline = time.monotonic() + 60
        while (silent := hangs.poll(time.monotonic())) is None:
            assert time.monotonic() < deadline, attempt.logs()
            time.sleep(0.1)
    finally:
        for process in attempt.processes:
            process.kill()
    assert (silent.rank, silent.phase) == (0, "generating")


# Sabotage, which runs in the processes of the ranks


def _lose_the_environment(rank: int) -> None:
    from megatron_rl.agent.environments.arithmetic import ArithmeticEnvironment

    answer, asked = ArithmeticEnvironment.group_rollout, 0

    async def fails(self: Any, request: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked > 8:
            raise RuntimeError("the sandbox is gone")
        return await answer(self, request)

    ArithmeticEnvironment.group_rollout = fails  # type: ignore[method-assign]


def _wait_for_ever(rank: int) -> None:
    import asyncio

    from megatron_rl.agent.environments.arithmetic import ArithmeticEnvironment

    os.environ[SILENCE_VARIABLE] = "3"

    answer = ArithmeticEnvironment.group_rollout

    async def waits(self: Any, request: Any) -> Any:
        if request.group_size == 1:  # the right answers, which are scored before the first step
            return await answer(self, request)
        return await asyncio.sleep(1000)

    ArithmeticEnvironment.group_rollout = waits  # type: ignore[method-assign]
