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

pytestmark = pytest.mark.slow

STEPS, PROMPTS = 8, 4
LATER = ["start", "sleep", "generate"]


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

    def front(run: RunDir, number: int, start: int = 0, attempt: int = 1, stands_at: int | None = None) -> FrontBeside:
        made.append(FrontBeside(run, number, start, attempt))
        made[-1].weights.stands_at = stands_at
        return made[-1].__enter__()

    yield front
    for each in made:
        each.die()


def stands(fronts: list[FrontBeside]) -> None:
    """Wait until the run waits for answers of all these, which sample nothing."""
    for front in fronts:
        until(lambda front=front: front.stands, "an engine has requests and stands", 60)


def asked_to_leave(attempt: Attempt) -> None:
    for process in attempt.processes:
        os.kill(process.pid or 0, signal.SIGUSR1)


@pytest.mark.parametrize(
    ("offload", "max_lag"),
    [
        ("optimizer", 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("optimizer", 0), ("buffers", 1), ("none", 0)]),
    ],
)
def test_a_killed_front_comes_back_and_a_drained_run_continues(
    tmp_path: Path, cache: Path, fronts: Callable[..., FrontBeside], offload: Offload, max_lag: int
) -> None:
    run = prepare(tmp_path / "run", recipe(offload, max_lag))
    first = Attempt(run, cache)
    one, other = fronts(run, 0, stands_at=2), fronts(run, 1)
    stands([one])
    other.die()
    again = fronts(run, 1, start=1, stands_at=4)
    until(lambda: again.known, "the ranks know of the one that came")
    one.go_on()
    stands([again])
    assert again.versions in ([3, 4], [4]), "it has started before a version was sent"
    assert again.acts[0] == "start"
    assert one.versions == [0, 1, 2, 3, 4]
    asked_to_leave(first)
    assert first.exit_codes() == [EXIT_DRAINED] * 2, first.logs()
    outcome = outcome_of(first.files)
    assert outcome is not None
    assert (outcome.outcome, outcome.step) == (DRAINED, 4)

    second = Attempt(run, cache)
    last = [fronts(run, number, attempt=2) for number in range(2)]
    assert second.exit_codes() == [0, 0], second.logs()
    assert len(fates(run)) == STEPS * PROMPTS
    assert max(line["staleness_max"] for line in lines_of(run.metrics)) <= max_lag
    assert all(torch_equal(last[0].weights.loaded, each.weights.loaded) for each in last)


def test_training_survives_deaths_of_all_engines_of_one_that_gets_weights_and_of_the_ranks(
    tmp_path: Path, cache: Path, fronts: Callable[..., FrontBeside]
) -> None:
    run = prepare(tmp_path / "run", recipe("optimizer"))
    first = Attempt(run, cache)
    both = [fronts(run, number, stands_at=1) for number in range(2)]
    stands(both)
    for front in both:
        front.die()
    both = [fronts(run, number, start=1, stands_at=4) for number in range(2)]
    both[1].weights.dies_at = 3
    stands(both[:1])
    assert sorted({*both[0].versions}) == [1, 2, 3, 4]
    assert both[1].versions in ([1, 2], [1, 2, 4])
    first.kill()

    second = Attempt(run, cache)
    for number in range(2):
        fronts(run, number, attempt=2)
    assert second.exit_codes() == [0, 0], second.logs()
    assert len(fates(run)) == STEPS * PROMPTS


@pytest.mark.parametrize("act", ["receive", *(pytest.param(act, marks=pytest.mark.slow) for act in LATER)])
def test_ranks_that_are_asked_to_leave_in_any_act_save_the_last_step(
    tmp_path: Path, cache: Path, fronts: Callable[..., FrontBeside], act: str
) -> None:
    run = prepare(tmp_path / "run", recipe("optimizer", max_lag=1))
    first, held, let = Attempt(run, cache), threading.Event(), threading.Event()
    both = [fronts(run, number, stands_at=3) for number in range(2)]
    stands(both)

    def hold(now: str) -> None:
        if now == act:
            held.set()
            assert let.wait(30)

    both[1].weights.hold = hold
    if act == "start":
        for front in both:
            front.die()
        late = fronts(run, 0, start=1)
        late.let_start.clear()
        until(lambda: late.acts, "the ranks wait for the start", 30)
    elif act != "generate":
        for front in both:
            front.go_on()
        assert held.wait(30)
    asked_to_leave(first)
    let.set()
    assert first.exit_codes() == [EXIT_DRAINED] * 2, first.logs()
    outcome = outcome_of(first.files)
    assert outcome is not None
    assert (outcome.outcome, outcome.step) == (DRAINED, len(lines_of(run.metrics)))

    second = Attempt(run, cache)
    for number in range(2):
        fronts(run, number, attempt=2)
    assert second.exit_codes() == [0, 0], second.logs()
    assert len(fates(run)) == STEPS * PROMPTS


@pytest.mark.slow
def test_ranks_that_wait_for_fronts_leave_when_they_are_asked_to(
    tmp_path: Path, cache: Path, fronts: Callable[..., FrontBeside]
) -> None:
    run = prepare(tmp_path / "run", recipe("optimizer"))
    attempt = Attempt(run, cache)
    only = fronts(run, 0)
    until(lambda: only.acts == ["start"] * len(only.acts) and only.known, "the ranks know one of two fronts")
    until(lambda: "waiting for vLLM: replica 1" in attempt.files.progress.read_text(), "they say what they wait for")
    asked_to_leave(attempt)
    assert attempt.exit_codes() == [EXIT_DRAINED] * 2, attempt.logs()


def torch_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
