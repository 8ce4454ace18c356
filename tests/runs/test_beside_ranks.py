"""Runs whose engines are on the devices of the training ranks train each prompt once, whatever ends and whenever."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from exactly_once import fates
from fronts_beside import FrontBeside, few_tokens
from loop_helpers import Attempt, lines_of, loop_recipe, outcome_of, prepare

from megatron_rl.contract.codes import DRAINED, EXIT_DRAINED
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.job import Offload

STEPS, PROMPTS = 8, 4


def recipe(offload: Offload, max_lag: int = 0) -> dict[str, Any]:
    """Two ranks, each with an engine on its device."""
    return loop_recipe(
        job={"nodes": 1, "gpus_per_node": 2, "collective_timeout_s": 60, "silence_limit_s": 60},
        model={"num_attention_heads": 1, "num_query_groups": 1},
        grpo={"prompts_per_step": PROMPTS, "iterations": 1},
        training={"steps": STEPS},
        evaluation={"every": 4},
        save={"every": 2},
        inference={"engine": "vllm"},
        placement={"offload": offload},
        resume={"partial": "keep"},
        **{"async": {"max_lag": max_lag}},
    )


@pytest.fixture
def fronts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FrontBeside]]:
    """Makes fronts, which end with the test."""
    few_tokens(monkeypatch, 12)
    made: list[FrontBeside] = []

    def front(run: RunDir, number: int, start: int = 0, attempt: int = 1) -> FrontBeside:
        made.append(FrontBeside(run, number, start, attempt))
        return made[-1].__enter__()

    yield front
    for each in made:
        each.die()


def asked_to_leave(attempt: Attempt) -> None:
    for process in attempt.processes:
        os.kill(process.pid or 0, signal.SIGUSR1)
    assert attempt.exit_codes() == [EXIT_DRAINED] * 2, attempt.logs()


@pytest.mark.parametrize(
    ("offload", "max_lag"), [("optimizer", 0), ("optimizer", 1), ("buffers", 1), pytest.param("none", 0)]
)
def test_a_killed_front_comes_back_and_a_drained_run_continues(
    tmp_path: Path, cache: Path, fronts: Callable[..., FrontBeside], offload: Offload, max_lag: int
) -> None:
    run = prepare(tmp_path / "run", recipe(offload, max_lag))
    first = Attempt(run, cache)
    one, other = fronts(run, 0), fronts(run, 1)
    first.wait_for_step(2)
    other.die()
    first.wait_for_step(3)
    again = fronts(run, 1, start=1)
    first.wait_for_step(5)
    assert again.versions, "it has started between two steps, and got a version"
    assert again.acts[0] == "start"
    assert one.versions == sorted(one.versions)
    asked_to_leave(first)
    outcome = outcome_of(first.files)
    assert outcome is not None
    assert outcome.outcome == DRAINED

    second = Attempt(run, cache)
    last = [fronts(run, number, attempt=2) for number in range(2)]
    assert second.exit_codes() == [0, 0], second.logs()
    assert len(fates(run)) == STEPS * PROMPTS
    assert max(line["staleness_max"] for line in lines_of(run.metrics)) <= max_lag
    assert all(torch_equal(last[0].weights.loaded, each.weights.loaded) for each in last)


def torch_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
