"""Many drivers and replicas in one process: each prompt is trained on exactly once, in the step that the rules say,
whatever replicas do, over a drain, and in every layout.

With max_lag 0 the record is the same in every layout and after every fault: prompts, tokens, log-probs, versions,
rewards, positions, what is dropped and why, and all metrics except those of time and machine. With more, keys and
versions of answers depend on when weights arrive, and the rest is the same.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import pytest
from core_helpers import tiny_run
from exactly_once import fates
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from loop_helpers import reproducible
from many_drivers import Drain, Layout, ManyDrivers
from replica_fleet import Fault, Happening
from trained_ledger import PROBLEMS, Trained, is_right
from waiting import until

from megatron_rl.contract.codes import DRAINED, FINISHED
from megatron_rl.generate.replicas.link import LinkTimings
from megatron_rl.generate.replicas.shard import ENOUGH
from megatron_rl.learn.rollout.stream import PromptStream
from megatron_rl.recipe.config import RunConfig

IMPATIENT = LinkTimings(poll_s=2.0, silence_s=0.5, retry_s=0.01, check_s=0.2)


def recipe(prompts: int, steps: int, max_lag: int = 0) -> RunConfig:
    return tiny_run(
        grpo={"prompts_per_step": prompts, "group_size": 3, "dynamic_sampling": {"enabled": True}},
        sampling={"max_new_tokens": 12},
        training={"steps": steps},
        save={"every": 2},
        logging={"samples_every": 0},
        **{"async": {"max_lag": max_lag}},
    )


def quiet_run(folder: Path, config: RunConfig, platform: Any, layout: Layout) -> ManyDrivers:
    run = ManyDrivers(folder, config, platform, IMPATIENT)
    assert run.attempt(layout)[0] == FINISHED
    return run


def batches(run: ManyDrivers) -> list[list[Trained]]:
    return [run.ledger.batch(step) for step in range(1, run.config.training.steps + 1)]


def check(run: ManyDrivers) -> None:
    """Check that each prompt has one fate, which is that in the record, and that what was trained on are answers to it
    of weights that are young enough."""
    stream, fate = PromptStream(PROBLEMS, run.config.training.seed), fates(run.run_dir)
    lag = max(1, run.config.asynchronous.max_lag)  # dynamic sampling carries surplus groups over to the next step
    for step, batch in enumerate(batches(run), 1):
        assert [group.ordinal for group in batch] == [ordinal for ordinal, its in fate.items() if its == step]
        versions = range(max(0, step - 1 - lag), step)
        assert all(is_right(each, stream.problem(each.ordinal), run.config, versions) for each in batch)


def check_same(run: ManyDrivers, other: ManyDrivers) -> None:
    assert fates(run.run_dir) == fates(other.run_dir)
    if run.config.asynchronous.max_lag == 0:
        assert batches(run) == batches(other)
        assert reproducible(run.run_dir) == reproducible(other.run_dir)


@contextmanager
def all_closed() -> Iterator[None]:
    """Check that neither files nor threads stay. The connections between ranks close with their last reference."""

    def held() -> tuple[int, int]:
        gc.collect()
        return len([*Path("/proc/self/fd").iterdir()]), threading.active_count()

    before = held()
    yield
    until(lambda: held() == before, lambda: f"{before} files and threads before, {held()} after", limit_s=300)


HARD = [
    Fault(0, 0, 3, "dies"),
    Fault(0, 60, 4, "hangs"),
    Fault(1, 0, 5, "dies"),
    Fault(1, 10, 3, "starts again"),
    Fault(1, 60, 4, "wakes"),
    Fault(2, 5, 6, "hangs"),
    Fault(2, 10, 5, "starts again"),
    Fault(2, 60, 6, "starts again"),
    Fault(2, 60, 7, "starts again"),
]


def with_slow_ones(replica: int) -> float:
    return 0.05 if replica % 100 == 9 else 0.002


@pytest.mark.parametrize("max_lag", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_run_with_faults_and_a_drain_trains_on_what_a_quiet_run_of_few_drivers_trains_on(
    tmp_path: Path, platform: Any, max_lag: int
) -> None:
    config = recipe(prompts=32, steps=5, max_lag=max_lag)
    quiet = quiet_run(tmp_path / "quiet", config, platform, Layout(drivers=2, replicas=3))
    run = ManyDrivers(tmp_path / "hard", config, platform, IMPATIENT)
    with all_closed():
        outcome, counts = run.attempt(
            Layout(drivers=16, replicas=40),
            HARD,
            Drain(version=2, pieces=70, rank=11),
            pace_s=with_slow_ones,
            lossy=lambda replica: replica % 8 == 1,
        )
        assert outcome == DRAINED
        assert counts["died in an answer"] and counts["lost responses"]
        outcome, counts = run.attempt(Layout(drivers=6, replicas=20, tp=2), pace_s=with_slow_ones)
        assert outcome == FINISHED
        assert counts["resumed"], "no answer of the first attempt was kept"
    check(run)
    check_same(run, quiet)


@pytest.fixture(scope="module")
def quiet(platform: Any) -> Iterator[ManyDrivers]:
    with TemporaryDirectory() as folder:
        yield quiet_run(Path(folder), recipe(prompts=8, steps=3), platform, Layout(drivers=1, replicas=1))


# Replica 0 stays, since without any the run would wait for one.
FAULTS = st.lists(
    st.builds(Fault, st.integers(0, 2), st.integers(0, 30), st.integers(1, 5), st.sampled_from(get_args(Happening))),
    max_size=8,
)


@examples(6)
@given(faults=FAULTS, drain=st.none() | st.builds(Drain, st.integers(0, 2), st.integers(1, 20), st.integers(0, 3)))
def test_no_order_of_faults_changes_the_record(faults: list[Fault], drain: Drain | None, quiet: ManyDrivers) -> None:
    with TemporaryDirectory() as folder:
        run = ManyDrivers(Path(folder), quiet.config, quiet.platform, IMPATIENT)
        outcome, _ = run.attempt(Layout(drivers=4, replicas=6), faults, drain)
        while outcome == DRAINED:
            outcome, _ = run.attempt(Layout(drivers=3, replicas=6))
        check(run)
        check_same(run, quiet)


PATIENT = LinkTimings(poll_s=120.0, silence_s=5.0, retry_s=0.05, check_s=10.0)
"""Intervals for tens of thousands of links in one process, which would otherwise only poll."""


def deaths(replicas: int, steps: int, pieces: int, seed: int = 0) -> list[Fault]:
    """One replica in twenty dies in the middle of an answer, and starts again in the next step."""
    draw = random.Random(seed)
    found = []
    for number, replica in enumerate(draw.sample(range(replicas), replicas // 20)):
        version = number % (steps - 1)
        found += [Fault(version, 0, replica, "dies")]
        found += [Fault(version + 1, draw.randrange(pieces), replica, "starts again")]
    return found


def check_large_run(folder: Path, platform: Any, layout: Layout, prompts: int, steps: int) -> None:
    config = recipe(prompts, steps)
    run = ManyDrivers(folder / "large", config, platform, PATIENT, limit_s=3000.0)
    with all_closed():
        drain = Drain(version=steps // 2, pieces=prompts, rank=layout.ranks // 3)
        outcome, counts = run.attempt(layout, deaths(layout.replicas, steps, prompts), drain, pace_s=with_slow_ones)
        assert outcome == DRAINED and counts["died in an answer"]
        outcome, counts = run.attempt(layout, deaths(layout.replicas, steps, prompts, seed=1), pace_s=with_slow_ones)
        assert outcome == FINISHED and counts["resumed"]
    check(run)
    check_same(run, quiet_run(folder / "few", config, platform, Layout(drivers=8, replicas=16)))
    assert max(links for driver, links in run.ledger.links.items() if driver) <= 2 * ENOUGH
    of_steps = [*run.ledger.resident.values()]
    grown = of_steps[-1] - of_steps[steps // 2 + 1]
    assert grown < 512 << 20, f"MiB after each step: {[size >> 20 for size in of_steps]}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_512_drivers_and_1000_replicas(tmp_path: Path, platform: Any) -> None:
    check_large_run(tmp_path, platform, Layout(drivers=512, replicas=1000), prompts=1024, steps=20)
