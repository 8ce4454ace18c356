"""Evaluations beside training record what evaluations record for which training waits, also if the run is killed or
drained in their middle. In these runs a step has two updates, so the weights after step 2 are version 4."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from loop_helpers import Attempt, lines_of, loop_recipe, prepare, reproducible
from waiting import until

from megatron_rl.contract.codes import EXIT_DRAINED
from megatron_rl.contract.manifest import read_manifest
from megatron_rl.contract.paths import RunDir

pytestmark = pytest.mark.slow

STEPS = 6


def recipe(**beside: Any) -> dict[str, Any]:
    """Two training ranks, and with `beside` two replicas of one rank."""
    apart = {"nodes": 1} if beside else {}
    return loop_recipe(
        job={"nodes": 1 + len(apart), "gpus_per_node": 2, "collective_timeout_s": 60},
        training={"steps": STEPS},
        evaluation={"every": 2, "samples": 2, **beside},
        save={"every": 1, "keep": 1},
        placement={
            "training": {"tp": 1},
            "inference": {"tp": 1, **apart},
            "mode": "partitioned" if beside else "colocated",
        },
    )


def hold_evaluations(held: dict[int, Path], rank: int) -> None:
    """Make a replica sample nothing with a held version while its only requests are those of an evaluation, and say so
    in a file beside."""
    from megatron_rl.generate.engine.interface import GenerationRequest
    from megatron_rl.generate.replica.leader import Leader

    step, submit, training = Leader.step, Leader.submit, set()

    def and_note(leader: Leader, request: GenerationRequest, *, streamed: bool = False) -> str:
        if request.ordinal is not None:
            training.add(request.id)
        return submit(leader, request, streamed=streamed)

    def or_hold(leader: Leader) -> None:
        file = held.get(leader.version or 0)
        if file is None or file.exists() or training & leader._reported.keys():
            step(leader)
        else:
            file.with_suffix(".reached").touch()
            time.sleep(0.01)

    Leader.step, Leader.submit = or_hold, and_note  # type: ignore[method-assign]


def begin(run_dir: RunDir, cache: Path, held: dict[int, Path]) -> Attempt:
    """Start an attempt. held: policy version -> file without which replicas answer no evaluation of this version."""
    attempt = Attempt(run_dir, cache, sabotage=partial(wait_for_replicas, run_dir, run_dir.last_attempt() + 1))
    for number in (0, 1):
        attempt.start_replica(number, sabotage=partial(hold_evaluations, held))
    return attempt


def wait_for_replicas(run_dir: RunDir, attempt: int, rank: int) -> None:
    """Make training ranks start when both replicas respond: with a single one, training would wait for evaluations."""
    files = run_dir.attempt(attempt)
    until(lambda: all(files.replica(number).listener.exists() for number in (0, 1)), "both replicas answer")


def alone(root: Path, cache: Path) -> Any:
    attempt = Attempt(prepare(root, recipe()), cache)
    assert attempt.exit_codes() == [0, 0], attempt.logs()
    return reproducible(attempt.run_dir)


def pending(run_dir: RunDir, step: int) -> bool:
    """Whether the checkpoint of a step is published, and says that an evaluation is not recorded yet."""
    folder = run_dir.checkpoint(step)
    return folder.exists() and read_manifest(folder).meta["evaluating"] is not None


def test_training_goes_on_and_a_killed_run_repeats_the_evaluation(tmp_path: Path, cache: Path) -> None:
    run_dir = prepare(tmp_path / "beside", recipe(replicas=1))
    open_, never = tmp_path / "open", tmp_path / "never"
    first = begin(run_dir, cache, {4: open_, 8: never})
    first.wait_for_step(3)
    assert [line["step"] for line in lines_of(run_dir.evaluations)] == [0]
    open_.touch()
    first.wait_for_step(5)
    assert [line["step"] for line in lines_of(run_dir.evaluations)] == [0, 2]
    until(lambda: pending(run_dir, 5), "a checkpoint with an unfinished evaluation is published")
    assert run_dir.checkpoint_steps() == [5, 4], "the weights of the evaluated step stay, although one is kept"
    first.kill()

    second = begin(run_dir, cache, {})
    assert second.exit_codes() == [0, 0], second.logs()
    assert reproducible(run_dir) == alone(tmp_path / "alone", cache)
    assert run_dir.checkpoint_steps() == [STEPS]


@pytest.mark.slow
def test_a_drain_waits_for_no_evaluation_and_none_is_lost_or_recorded_twice(tmp_path: Path, cache: Path) -> None:
    """The second attempt is drained while it repeats the evaluation, the third loses the replica that kept weights."""
    run_dir = prepare(tmp_path / "beside", recipe(replicas=1))
    for number in range(2):
        attempt = begin(run_dir, cache, {4: tmp_path / f"never-{number}"})
        attempt.wait_for_step(3)
        until((tmp_path / f"never-{number}.reached").exists, "the evaluation is answered")
        for process in attempt.processes:
            os.kill(process.pid or 0, signal.SIGUSR1)
        assert attempt.exit_codes() == [EXIT_DRAINED] * 2, attempt.logs()
        assert run_dir.checkpoint_steps()[0] in (3, 4)
        assert [line["step"] for line in lines_of(run_dir.evaluations)] == [0]
    last = begin(run_dir, cache, {})
    assert last.exit_codes() == [0, 0], last.logs()
    assert reproducible(run_dir) == alone(tmp_path / "alone", cache)


@pytest.mark.slow
def test_answers_of_a_lost_replica_are_lost_and_training_goes_on(tmp_path: Path, cache: Path) -> None:
    run_dir = prepare(tmp_path / "beside", recipe(replicas=1))
    attempt = begin(run_dir, cache, {4: tmp_path / "never"})
    attempt.wait_for_step(3)
    attempt.replicas[0].kill()
    attempt.start_replica(0, start=1)
    assert attempt.exit_codes() == [0, 0], attempt.logs()
    steps, evaluations = reproducible(run_dir)
    expected, complete = alone(tmp_path / "alone", cache)
    assert steps == expected
    assert [line["step"] for line in evaluations] == [0, 2, 4, 6]
    lost = {name: value for name, value in evaluations[1].items() if name.endswith("failed_rollouts")}
    assert lost and all(count > 0 for count in lost.values())
    assert [line for line in evaluations if line["step"] != 2] == [line for line in complete if line["step"] != 2]
