"""Runs whose answers come from replicas in other processes record the same as without replicas, whatever happens to a
replica."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from loop_helpers import Attempt, lines_of, loop_recipe, outcome_of, prepare, reproducible
from waiting import until

from megatron_rl.contract.codes import DRAINED, EXIT_DRAINED
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.engine.interface import EngineLoad

STEPS = 4


def recipe(training: dict[str, int], inference: dict[str, int], **placement: str) -> dict[str, Any]:
    """Two nodes of two ranks each if partitioned, else one node."""
    apart = {"nodes": 1} if placement else {}
    return loop_recipe(
        job={"nodes": 1 + len(apart), "gpus_per_node": 2, "collective_timeout_s": 60},
        training={"steps": STEPS},
        evaluation={"every": 2, "samples": 4, "pass_at": [1, 4]},
        save={"every": 2},
        placement={"training": training, "inference": inference | apart, **placement},
    )


def partitioned(training: dict[str, int], inference: dict[str, int], **environment: float) -> dict[str, Any]:
    changed = recipe(training, inference, mode="partitioned")
    return changed | {"environment": changed["environment"] | environment}


def by_themselves(root: Path, cache: Path, training: dict[str, int], inference: dict[str, int]) -> Any:
    """Record of the training ranks without replicas."""
    attempt = Attempt(prepare(root, recipe(training, inference)), cache)
    assert attempt.exit_codes() == [0, 0], attempt.logs()
    return reproducible(attempt.run_dir)


@pytest.mark.parametrize(
    ("training", "inference", "replicas"),
    [
        pytest.param({"tp": 2}, {"tp": 1}, [1, 1], id="two replicas of a rank", marks=pytest.mark.slow),
        pytest.param({"tp": 2}, {"tp": 2}, [2], id="one of two ranks"),
    ],
)
def test_replicas_answer_as_the_training_ranks_would(
    tmp_path: Path, cache: Path, training: dict[str, int], inference: dict[str, int], replicas: list[int]
) -> None:
    """Also if the first replica stops until its requests time out and are repeated, and if a step is profiled."""
    limits = {"rollout_limit_s": 2.0, "reward_retries": 100}
    profile = {"steps": [3, 3], "ranks": None, "generation": True}
    profiled = partitioned(training, inference, **limits) | {"profile": profile}
    attempt = Attempt(prepare(tmp_path / "partitioned", profiled), cache)
    told = tmp_path / "told"
    stops = [partial(stop_until_cancelled, 2, told), *[None] * len(replicas)]
    ranks = [
        rank for number, count in enumerate(replicas) for rank in attempt.start_replica(number, count, 0, stops[number])
    ]
    assert attempt.exit_codes() == [0, 0], attempt.logs()
    until(lambda: not any(each.is_alive() for each in ranks), "the replicas end with the run")
    assert {each.exitcode for each in ranks} == {0}, attempt.logs()
    before, after = json.loads(told.read_text())
    assert before["running"] > 0 and before["free_pages"] < before["pages"]
    assert after["running"] == 0 and after["free_pages"] == after["pages"]
    assert reproducible(attempt.run_dir) == by_themselves(tmp_path / "alone", cache, training, inference)
    names = [f"infer-{number}.{rank}" for number, count in enumerate(replicas) for rank in range(count)]
    traces = sorted(path.name for path in attempt.files.profile.iterdir())
    assert traces == sorted(f"{name}.step-000003.json.gz" for name in [*names, "train.0", "train.1"])


def test_killed_replicas_and_a_drain_during_generation_leave_the_record_unchanged(tmp_path: Path, cache: Path) -> None:
    run_dir = prepare(tmp_path / "partitioned", partitioned({"tp": 1}, {"tp": 1}))
    attempt = Attempt(run_dir, cache)
    killed = attempt.start_replica(0, sabotage=partial(die_at, 2)) + attempt.start_replica(
        1, sabotage=partial(die_at, 4)
    )
    until(lambda: not any(each.is_alive() for each in killed), "both have killed themselves")
    assert [each.exitcode for each in killed] == [-signal.SIGKILL] * 2, attempt.logs()
    reached = tmp_path / "reached"
    others = attempt.start_replica(0, start=1, sabotage=partial(hold_at, 6, reached))
    until(reached.exists, "the one that came instead of them is in mid-generation")
    for process in [*attempt.processes, *others]:
        os.kill(process.pid or 0, signal.SIGUSR1)
    assert attempt.exit_codes() == [EXIT_DRAINED] * 2, attempt.logs()
    until(lambda: not any(each.is_alive() for each in others), "the replica leaves too")
    assert [each.exitcode for each in others] == [EXIT_DRAINED], attempt.logs()
    ended = outcome_of(attempt.files)
    assert ended is not None
    assert (ended.outcome, ended.step) == (DRAINED, 3)

    again = Attempt(run_dir, cache)
    again.start_replica(0)
    assert again.exit_codes() == [0, 0], again.logs()
    assert reproducible(run_dir) == by_themselves(tmp_path / "alone", cache, {"tp": 1}, {"tp": 1})


AHEAD_STEPS, PROMPTS = 14, 5


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_generation_ahead_trains_each_prompt_once_and_no_token_beyond_the_bound(
    tmp_path: Path, cache: Path, max_lag: int
) -> None:
    """A replica is killed during generation, another one stops until its requests are lost, and the run is drained and
    restarted."""
    run_dir = prepare(tmp_path / "ahead", ahead(max_lag))
    first = Attempt(run_dir, cache, sabotage=partial(wait_for_both, run_dir))
    killed = first.start_replica(0, sabotage=partial(die_at, 3))
    first.start_replica(1, sabotage=partial(stop_until_cancelled, 1, tmp_path / "told"))
    first.wait_for_step(4)
    until(lambda: any(line["failed_rollouts"] for line in lines_of(run_dir.metrics)), "answers are given up")
    until(lambda: not killed[0].is_alive(), "the first replica has killed itself")
    assert killed[0].exitcode == -signal.SIGKILL
    first.start_replica(0, start=1)
    first.wait_for_step(9)
    for process in first.processes:
        os.kill(process.pid or 0, signal.SIGUSR1)
    assert first.exit_codes() == [EXIT_DRAINED] * 2, first.logs()

    second = Attempt(run_dir, cache)
    second.start_replica(0)
    assert second.exit_codes() == [0, 0], second.logs()
    steps = lines_of(run_dir.metrics)
    assert [line["step"] for line in steps] == [*range(1, AHEAD_STEPS + 1)]
    assert [line["first_ordinal"] for line in steps] == [PROMPTS * index for index in range(AHEAD_STEPS)]
    assert max(line["staleness_max"] for line in steps) == max_lag
    busy = [line["system/replica_busy_mean"] for line in steps if "system/replica_busy_mean" in line]
    assert max(busy) > 0
    assert all(0 <= share <= 1.05 for share in busy)
    assert not any("throughput/generated_tokens_per_s" in line for line in steps)
    assert "scored groups and" in second.logs(), "answers from before the drain must be used"


@pytest.mark.slow
def test_training_ranks_answer_the_next_prompts_beside_the_last_of_a_batch(tmp_path: Path, cache: Path) -> None:
    """Two ranks are one engine; unfinished answers wait while they train."""
    changed = ahead(1) | {"placement": {"training": {"tp": 2}, "inference": {"tp": 2}}}
    changed["job"]["nodes"] = 1
    changed["inference"] = {"max_batch": 12}  # fewer rows than a window has answers
    attempt = Attempt(prepare(tmp_path / "ahead", changed), cache)
    assert attempt.exit_codes() == [0, 0], attempt.logs()
    steps = lines_of(attempt.run_dir.metrics)
    assert [line["first_ordinal"] for line in steps] == [PROMPTS * index for index in range(AHEAD_STEPS)]
    assert max(line["staleness_max"] for line in steps) == 1


def ahead(max_lag: int) -> dict[str, Any]:
    """One update per step, so that a policy version is a step."""
    changed = partitioned({"tp": 1}, {"tp": 1}, rollout_limit_s=4.0, reward_retries=0)
    changed["training"]["steps"] = AHEAD_STEPS
    changed["grpo"] |= {"iterations": 1, "prompts_per_step": PROMPTS, "importance": {"upper": 2.0}}
    return changed | {"resume": changed["resume"] | {"partial": "keep"}, "async": {"max_lag": max_lag}}


def wait_for_both(run_dir: RunDir, rank: int) -> None:
    """Make training ranks start when two replicas respond. A single replica would get all requests of a step; if it
    stopped, none of them could be scored, which would end the run."""
    attempt = run_dir.attempt(1)
    until(lambda: all(attempt.replica(number).listener.exists() for number in range(2)), "both replicas answer")


def die_at(version: int, rank: int) -> None:
    """Make a replica kill itself while it generates with weights of this version or a later one."""
    from megatron_rl.generate.replica.leader import Leader

    step = Leader.step

    def and_die(leader: Leader) -> None:
        step(leader)
        if leader.version is not None and leader.version >= version and leader.busy:
            os.kill(os.getpid(), signal.SIGKILL)

    Leader.step = and_die  # type: ignore[method-assign]


def hold_at(version: int, reached: Path, rank: int) -> None:
    """Make a replica stop during a generation with weights of this version, and report it."""
    from megatron_rl.generate.replica.leader import Leader

    step = Leader.step

    def or_hold(leader: Leader) -> None:
        if leader.version == version and leader.busy:
            reached.touch()
            time.sleep(0.01)
        else:
            step(leader)

    Leader.step = or_hold  # type: ignore[method-assign]


def stop_until_cancelled(version: int, told: Path, rank: int) -> None:
    """Make a replica stop during a generation, with weights of this version or a later one, until nobody waits for its
    answers, and record its load before and after."""
    from megatron_rl.generate.replica.leader import Leader

    step, cancel = Leader.step, Leader.cancel
    stopped: list[EngineLoad] = []

    def or_stop(leader: Leader) -> None:
        if told.exists() or (leader.version or 0) < version or not leader.load.running:
            step(leader)
            return
        stopped.append(leader.load)
        time.sleep(0.01)

    def and_tell(leader: Leader, request_id: str) -> None:
        cancel(leader, request_id)
        if stopped and not leader.load.running and not told.exists():
            told.write_text(json.dumps([asdict(stopped[0]), asdict(leader.load)]))

    Leader.step, Leader.cancel = or_stop, and_tell  # type: ignore[method-assign]
