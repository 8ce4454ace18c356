"""A rank leaves soon after a request, in every phase, and the run resumes as if it had not been interrupted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from loop_helpers import Attempt, lines_of, loop_recipe, outcome_of, prepare, reproducible
from waiting import until

from megatron_rl.contract.attempt_records import Drain, Outcome, TimelineLine
from megatron_rl.contract.codes import DRAINED, EXIT_DRAINED, PREEMPTED, SIGNALLED
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.plan_records import CheckpointPlan, PlanRecord
from megatron_rl.contract.records import Unreadable, if_readable, read, read_lines, write

STEPS = 6
SLOW_S = 3600.0
"""Seconds that the interrupted phase would take: far more than `exit_codes` waits for."""


def recipe() -> dict[str, Any]:
    return loop_recipe(training={"steps": STEPS}, evaluation={"every": 3}, save={"every": 2})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> RunDir:
    run_dir = prepare(tmp_path_factory.mktemp("runs") / "undisturbed", recipe())
    attempt = Attempt(run_dir, cache)
    assert attempt.exit_codes() == [0, 0], attempt.logs()
    return run_dir


def slices(folder: Path) -> Iterator[float]:
    """Yield during many short sleeps, SLOW_S in all; the first one reports to the test that the phase has begun."""
    for _ in range(int(SLOW_S / 0.05)):
        (folder / "here").touch()
        yield 0.05


# Functions that slow a phase down, called in each rank before it starts.


def slow_teaching(folder: Path, rank: int) -> None:
    from megatron_rl.learn.training import warm_up

    original = warm_up.pack

    def slowly(*args: Any, **options: Any) -> Any:
        (folder / "here").touch()
        time.sleep(0.5)  # there are 40 steps
        return original(*args, **options)

    warm_up.pack = slowly


def slow_generation(folder: Path, rank: int) -> None:
    from megatron_rl.generate.engine.engine import Engine

    original = Engine.step

    def slowly(engine: Engine) -> None:
        if engine.policy_version >= 6 and rank == 1:  # step 4: three steps of two updates precede it
            for pause in slices(folder):
                time.sleep(pause)
                if (folder / "go on").exists():  # one decoding step is short; there are many
                    break
        original(engine)

    Engine.step = slowly  # type: ignore[assignment,method-assign]


def slow_reward(folder: Path, rank: int) -> None:
    from megatron_rl.agent.environments.arithmetic import ArithmeticEnvironment

    original = ArithmeticEnvironment.get_reward
    calls = 0

    async def slowly(environment: Any, *args: Any) -> float:
        nonlocal calls
        calls += 1
        if calls > 60 and rank == 0:
            (folder / "here").touch()
            await asyncio.sleep(SLOW_S)
        return original(environment, *args)

    ArithmeticEnvironment.get_reward = slowly  # type: ignore[assignment,method-assign]


def slow_forward(method: str, policy_version: int, folder: Path, rank: int) -> None:
    """Slow down `score`, the log-probs before the first update, or `_update`, the micro-batches of an update."""
    from megatron_rl.learn.training import trainer as module
    from megatron_rl.learn.training.trainer import Trainer

    original, logprobs = getattr(Trainer, method), module.predicted_logprobs

    def slowly(trainer: Trainer, *args: Any) -> Any:
        def pausing(*inputs: Any, **named: Any) -> Any:
            time.sleep(0.3)
            return logprobs(*inputs, **named)

        if trainer.policy_version == policy_version:
            (folder / "here").touch()
            module.predicted_logprobs = pausing
        try:
            return original(trainer, *args)
        finally:
            module.predicted_logprobs = logprobs

    setattr(Trainer, method, slowly)


def slow_evaluation(folder: Path, rank: int) -> None:
    from megatron_rl.agent.environments.arithmetic import ArithmeticEnvironment

    original = ArithmeticEnvironment.evaluate

    async def slowly(environment: Any, request: Any) -> Any:
        if request.inference.policy_version == 6:
            (folder / "here").touch()
            await asyncio.sleep(SLOW_S)
        return await original(environment, request)

    ArithmeticEnvironment.evaluate = slowly  # type: ignore[assignment,method-assign]


def slow_second_rank(folder: Path, rank: int) -> None:
    """Delay the second rank, for which the other waits at the rendezvous."""
    if rank == 1:
        from megatron_rl.run import attempt

        original = attempt.connect

        def slowly(*args: Any) -> Any:
            time.sleep(1)  # until the other rank is there
            for pause in slices(folder):
                time.sleep(pause)
            return original(*args)

        attempt.connect = slowly


PHASES: dict[str, tuple[Callable[..., None], int | None]] = {
    "starting": (slow_second_rank, None),
    "teaching the base model": (slow_teaching, None),
    "generating": (slow_generation, 3),
    "scoring": (slow_reward, None),
    "computing log-probs": (partial(slow_forward, "score", 6), 3),
    "training": (partial(slow_forward, "_update", 6), 3),
    "evaluating": (slow_evaluation, 3),
}
"""Phase -> function that slows it down, and the step saved when leaving, where it is always the same."""


OFFLOADED = ("generating", "training", "evaluating")
"""Phases tested with Adam's state in host memory. The undisturbed run never moves it there."""


SHOWN_ELSEWHERE = ("scoring", "computing log-probs", "generating")
"""Phases covered by other tests: the first below, where a save does not fit; the second in test_layouts_agree.py; the
third in test_bank_run.py."""


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=pytest.mark.slow if phase in SHOWN_ELSEWHERE else ()) for phase in PHASES]
)
def test_rank_leaves_soon_and_the_record_continues(
    phase: str, undisturbed: RunDir, tmp_path: Path, cache: Path
) -> None:
    slow, saved = PHASES[phase]
    offloaded = phase in OFFLOADED
    run_dir = prepare(tmp_path / "run", recipe() | {"placement": {"offload": "optimizer" if offloaded else "none"}})
    own_cache = tmp_path / "empty" if phase.startswith("teaching") else cache
    first = Attempt(run_dir, own_cache, sabotage=partial(slow, tmp_path))
    wait_for(tmp_path / "here", first)
    for process in first.processes:
        process.terminate()
    (tmp_path / "go on").touch()
    assert first.exit_codes() == [EXIT_DRAINED] * 2, first.logs()
    outcome = outcome_of(first.files)
    assert outcome is not None
    assert outcome.outcome == DRAINED
    if saved is not None:
        assert outcome.step == saved == run_dir.checkpoint_steps()[0]
    asked = if_readable(read(Drain, first.files.drain))
    assert asked is not None
    assert asked.cause == SIGNALLED
    second = Attempt(run_dir, cache)
    assert second.exit_codes() == [0, 0], second.logs()
    assert reproducible(run_dir) == reproducible(undisturbed)
    moved = [line.get("system/offloaded_bytes") for line in lines_of(run_dir.metrics)]
    assert all(moved) if offloaded else not any(moved)


def wait_for(file: Path, attempt: Attempt) -> None:
    def there() -> bool:
        if not file.exists():
            assert all(process.is_alive() for process in attempt.processes), attempt.logs()
        return file.exists()

    until(there, attempt.logs, 90.0)


# Work that does not fit before the deadline


def test_save_that_does_not_fit_is_not_begun(tmp_path: Path, cache: Path, undisturbed: RunDir) -> None:
    run_dir = prepare(tmp_path / "run", recipe())
    write(run_dir.plan, PlanRecord(1, 2, 0, [], checkpoint=CheckpointPlan(100.0)))
    first = Attempt(run_dir, cache, sabotage=partial(slow_reward, tmp_path))
    wait_for(tmp_path / "here", first)
    before = run_dir.checkpoint_steps()
    deadline = time.time() + 8
    write(first.files.drain, Drain(PREEMPTED, "test", time.time(), deadline))
    first.processes[0].terminate()
    assert first.exit_codes() == [EXIT_DRAINED] * 2, first.logs()
    assert time.time() < deadline
    if not before:  # otherwise a save is known to take a fraction of a second, and fits
        assert run_dir.checkpoint_steps() == []
        assert outcome_of(first.files) == Outcome(DRAINED)
    second = Attempt(run_dir, cache)
    assert second.exit_codes() == [0, 0], second.logs()
    assert reproducible(run_dir) == reproducible(undisturbed)


@pytest.mark.parametrize(
    ("left_s", "saved"),
    [pytest.param(None, 4, id="with time", marks=pytest.mark.slow), pytest.param(6.1, 2, id="without time")],
)
def test_step_that_has_changed_the_weights_is_finished_if_there_is_time(
    left_s: float | None, saved: int, tmp_path: Path, cache: Path, undisturbed: RunDir
) -> None:
    """Nothing can be saved between the two updates of step 4."""
    run_dir = prepare(tmp_path / "run", recipe())
    first = Attempt(run_dir, cache, sabotage=partial(slow_forward, "_update", 7, tmp_path))
    wait_for(tmp_path / "here", first)
    now = time.time()
    deadline = None if left_s is None else now + left_s
    write(first.files.drain, Drain(PREEMPTED, "test", now, deadline))
    for process in first.processes:
        process.terminate()
    assert first.exit_codes() == [EXIT_DRAINED] * 2, first.logs()
    assert outcome_of(first.files) == Outcome(DRAINED, saved)
    second = Attempt(run_dir, cache)
    assert second.exit_codes() == [0, 0], second.logs()
    assert reproducible(run_dir) == reproducible(undisturbed)


def late_to_start(late: int, folder: Path, rank: int) -> None:
    """Delay a rank that the others have met, before it notices."""
    from megatron_rl.rank.drain import DrainListener

    original = DrainListener.started

    def slowly(drain: DrainListener) -> None:
        if rank == late:
            (folder / "here").touch()
            time.sleep(SLOW_S)
        original(drain)

    DrainListener.started = slowly  # type: ignore[method-assign]


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_all_ranks_leave_if_one_leaves_before_the_rendezvous_ends(late: int, tmp_path: Path, cache: Path) -> None:
    run_dir = prepare(tmp_path / "run", recipe())
    attempt = Attempt(run_dir, cache, sabotage=partial(late_to_start, late, tmp_path))
    wait_for(tmp_path / "here", attempt)
    time.sleep(1)
    for process in attempt.processes:
        process.terminate()
    assert attempt.exit_codes() == [EXIT_DRAINED] * 2, attempt.logs()
    assert attempt.files.errors() == []
    assert outcome_of(attempt.files) == Outcome(DRAINED)


def stuck_evaluation(folder: Path, rank: int) -> None:
    """Make an evaluation hang that ignores requests to leave: the others wait for rank 0."""
    if rank == 0:
        from megatron_rl.agent.environments.arithmetic import ArithmeticEnvironment

        async def stuck(environment: Any, request: Any) -> Any:
            (folder / "here").touch()
            time.sleep(SLOW_S)

        ArithmeticEnvironment.evaluate = stuck  # type: ignore[assignment,method-assign]


def test_ranks_killed_one_after_the_other_do_not_blame_each_other(tmp_path: Path, cache: Path) -> None:
    """Slurm kills the ranks that have not left in time, but not all at the same moment."""
    run_dir = prepare(tmp_path / "run", recipe())
    attempt = Attempt(run_dir, cache, sabotage=partial(stuck_evaluation, tmp_path))
    wait_for(tmp_path / "here", attempt)
    for process in attempt.processes:
        process.terminate()
    time.sleep(1)
    for process in attempt.processes:
        process.kill()
        time.sleep(1)
    assert attempt.exit_codes() == [-9, -9], attempt.logs()
    assert attempt.files.errors() == []


def test_every_second_is_counted(undisturbed: RunDir) -> None:
    found = read_lines(TimelineLine, undisturbed.attempt(1).timeline)
    assert not isinstance(found, Unreadable)
    lines = found.records
    before = lines[0].began
    assert before is not None
    assert lines[0].ranks == 2
    assert lines[0].resumed == 0
    for line in lines:
        assert sum(line.seconds.values()) == pytest.approx(2 * (line.at - before), abs=1e-4)
        before = line.at
    assert [line.step for line in lines] == [0, *range(1, STEPS + 1), STEPS]
    counted = set().union(*(line.seconds for line in lines))
    assert {"start-up", "generate", "log-probs", "train", "save", "evaluate", "wait"} <= counted
