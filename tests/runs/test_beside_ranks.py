"""Runs whose engines are on the devices of the training ranks train each prompt once, whatever ends and whenever."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from exactly_once import fates
from fronts_beside import FrontBeside, few_tokens
from loop_helpers import Attempt, lines_of, loop_recipe, outcome_of, prepare
from waiting import until

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


def test_training_survives_that_all_engines_die_and_that_one_dies_while_it_gets_weights(
    tmp_path: Path, cache: Path, fronts: Callable[..., FrontBeside]
) -> None:
    run = prepare(tmp_path / "run", recipe("optimizer"))
    first = Attempt(run, cache)
    both = [fronts(run, number) for number in range(2)]
    first.wait_for_step(1)
    for front in both:
        front.die()
    both = [fronts(run, number, start=1) for number in range(2)]
    first.wait_for_step(3)
    version = max(both[0].versions) + 2
    both[1].weights.dies_at = version
    until(lambda: version in both[0].versions, "the other one gets the version")
    both[1].die()
    assert both[1].versions[-1] == version - 1
    fronts(run, 1, start=2)
    assert first.exit_codes() == [0, 0], first.logs()
    assert len(fates(run)) == STEPS * PROMPTS


@pytest.mark.parametrize("act", ["start", "sleep", "receive", "generate"])
def test_ranks_leave_in_any_act_and_killed_ones_continue_from_their_checkpoint(
    tmp_path: Path, cache: Path, fronts: Callable[..., FrontBeside], act: str
) -> None:
    run = prepare(tmp_path / "run", recipe("optimizer", max_lag=1))
    first, held, let = Attempt(run, cache), threading.Event(), threading.Event()
    both = [fronts(run, number) for number in range(2)]
    first.wait_for_step(3)

    def hold(now: str) -> None:
        if now == act:
            held.set()
            assert let.wait(30)

    both[1].weights.hold = hold
    if act == "start":
        both[1].die()
        both[1] = fronts(run, 1, start=1)
        both[1].let_start.clear()
        until(lambda: both[1].acts, "the ranks wait for the start")
    elif act == "generate":
        for front in both:
            front.engine.hold_at = 0
        until(lambda: both[0].engine.busy, "answers do not end")
    else:
        assert held.wait(30)
    for process in first.processes:
        os.kill(process.pid or 0, signal.SIGUSR1)
    let.set()
    assert first.exit_codes() == [EXIT_DRAINED] * 2, first.logs()
    outcome = outcome_of(first.files)
    assert outcome is not None
    assert (outcome.outcome, outcome.step) == (DRAINED, len(lines_of(run.metrics)))

    second = Attempt(run, cache)
    for number in range(2):
        fronts(run, number, attempt=2)
    second.wait_for_step(6)
    second.kill()
    third = Attempt(run, cache)
    for number in range(2):
        fronts(run, number, attempt=3)
    assert third.exit_codes() == [0, 0], third.logs()
    assert len(fates(run)) == STEPS * PROMPTS


def torch_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
