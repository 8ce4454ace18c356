"""Every prompt ends exactly once, trained or dropped, and the record equals that of an undisturbed run, at whatever
moments and however often the process or its machine dies or is asked to leave.

The runs are those of simulated_run.py: the real loop, record and checkpoints around a policy that is one number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from disk_helpers import Death, State
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulated_run import PROMPTS, STEPS, Record, Simulation, recipe

from megatron_rl.contract.rollout_records import read_rollouts

MakeRun = Callable[..., Simulation]
DYNAMIC = pytest.mark.parametrize("dynamic", [False, True], ids=["all prompts", "dynamic sampling and curriculum"])


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory, platform: Any, groups: Any) -> MakeRun:
    numbers = itertools.count()
    folder = tmp_path_factory.mktemp("runs")

    def make(dynamic: bool, left: State | None = None) -> Simulation:
        return Simulation(folder / str(next(numbers)), recipe(dynamic=dynamic), platform, groups, left)

    return make


@pytest.fixture(scope="module")
def undisturbed(make_run: MakeRun) -> dict[bool, Record]:
    """Records by whether sampling is dynamic."""
    runs = {dynamic: make_run(dynamic) for dynamic in (False, True)}
    assert [run.attempt() for run in runs.values()] == ["finished"] * 2
    return {dynamic: run.record() for dynamic, run in runs.items()}


def check_finished(run: Simulation, expected: Record) -> None:
    """Resume the run until it ends, and compare its record."""
    assert run.attempt() == "finished"
    assert run.record() == expected
    trained = [group for group in read_rollouts(run.run_dir, 1, STEPS) if not group.passed_over]
    assert {group.ordinal: group.step for group in trained} == expected.trained_on and len(trained) == STEPS * PROMPTS
    assert {path.suffix for path in run.run_dir.checkpoints.iterdir()} == {""}  # no temporary files


def distinct(deaths: list[State]) -> list[State]:
    """States that differ in files that the next attempt may read. Files of the attempt itself do not count, and of
    unpublished files only their existence does."""
    different: dict[Any, State] = {}
    for state in deaths:
        visible = {name: b"" if ".tmp" in name else content for name, content in state.items()}
        readable = tuple((name, content) for name, content in visible.items() if not name.startswith("attempts/"))
        different.setdefault(readable, state)
    return list(different.values())


# The expected record


@DYNAMIC
def test_undisturbed_run_settles_every_prompt_once(undisturbed: dict[bool, Record], dynamic: bool) -> None:
    record = undisturbed[dynamic]
    assert list(record.settled) == list(range(len(record.settled)))
    assert {o: fate for o, fate in record.settled.items() if isinstance(fate, int)} == record.trained_on
    assert len(record.trained_on) == STEPS * PROMPTS
    reasons = {fate for fate in record.settled.values() if isinstance(fate, str)}
    assert reasons == ({"no signal"} if dynamic else set())
    assert [line["step"] for line in record.evaluations] == [0, 3, STEPS]
    assert len({line["loss"] for line in record.steps}) == STEPS  # each step is distinct
    left_out = [line.get("curriculum_left_out") for line in record.steps]
    assert (sum(left_out) > 0) if dynamic else left_out == [None] * STEPS


# Deaths


FEW = 4
"""`make test` tries every fourth moment. A change of a file is two or three moments, so this meets all their kinds."""
EVERY = pytest.mark.parametrize("every", [FEW, pytest.param(1, marks=pytest.mark.slow)])


@pytest.mark.parametrize(
    ("dynamic", "every"),
    [
        pytest.param(True, FEW, id="dynamic sampling, some moments"),  # covers everything that can go wrong
        pytest.param(True, 1, id="dynamic sampling", marks=pytest.mark.slow),
        pytest.param(False, 1, id="all prompts", marks=pytest.mark.slow),
    ],
)
def test_run_that_dies_at_any_moment_ends_as_if_undisturbed(
    make_run: MakeRun, undisturbed: dict[bool, Record], dynamic: bool, every: int
) -> None:
    """Deaths come before every change of a file and in the middle of every write, with and without unsynced data."""
    whole = make_run(dynamic)
    assert whole.attempt(watch=True) == "finished"
    assert len(whole.disk.deaths) > 200
    for state in distinct(whole.disk.deaths)[::every]:
        check_finished(make_run(dynamic, state), undisturbed[dynamic])


@EVERY
def test_restart_that_dies_at_any_moment_ends_as_if_undisturbed(
    make_run: MakeRun, undisturbed: dict[bool, Record], every: int
) -> None:
    """The run died in step 4 with the checkpoint of step 2 half written, so the restart has a record to cut back,
    temporary files to delete, and a bank to read."""

    def half_way(state: State) -> bool:
        return len((state.get("metrics.jsonl") or b"").splitlines()) == 3 and any(".tmp/" in name for name in state)

    def deaths(behind: int) -> list[State]:
        whole = make_run(dynamic=True)
        assert whole.attempt(behind=behind, watch=True) == "finished"
        return whole.disk.deaths

    left = next(state for behind in range(5, 60, 5) for state in deaths(behind) if half_way(state))
    start = make_run(dynamic=True, left=left)
    assert start.attempt(ask_at=1, watch=True) == "drained"
    assert len(start.disk.deaths) > 20
    for state in distinct(start.disk.deaths)[::every]:
        check_finished(make_run(dynamic=True, left=state), undisturbed[True])


DEATHS = st.builds(Death, at=st.integers(1, 220), torn=st.sampled_from([0.0, 0.3, 1.0]), power=st.booleans())


@examples(6)
@given(deaths=st.lists(st.tuples(DEATHS, st.integers(0, 40)), min_size=2, max_size=5), dynamic=st.booleans())
def test_run_may_die_repeatedly(
    make_run: MakeRun, undisturbed: dict[bool, Record], deaths: list[tuple[Death, int]], dynamic: bool
) -> None:
    """Background writes lag behind the loop by a number of polls of the drain flag."""
    run = make_run(dynamic)
    for death, behind in deaths:
        if run.attempt(death, behind=behind) == "finished":
            break
    check_finished(run, undisturbed[dynamic])


# Requests to leave


@pytest.mark.parametrize(
    ("left_s", "every"),
    [
        pytest.param(None, FEW, id="time to finish the step, some polls"),
        pytest.param(None, 1, id="time to finish the step", marks=pytest.mark.slow),
        pytest.param(100.0, 1, id="time to save, not to finish the step", marks=pytest.mark.slow),
        pytest.param(0.0, 1, id="no time", marks=pytest.mark.slow),
    ],
)
def test_run_may_be_asked_to_leave_at_any_poll(
    make_run: MakeRun, undisturbed: dict[bool, Record], left_s: float | None, every: int
) -> None:
    whole = make_run(dynamic=True)
    assert whole.attempt() == "finished"
    for look in range(1, whole.looks + 1, every):
        run = make_run(dynamic=True)
        if run.attempt(ask_at=look, left_s=left_s, behind=look // every % 5) == "drained":
            check_finished(run, undisturbed[True])
        else:  # too late
            assert run.record() == undisturbed[True]
