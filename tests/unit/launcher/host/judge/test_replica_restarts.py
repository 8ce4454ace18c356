"""How often, and after what pause, a replica is started again, and what its end means for the run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.host.judge.replica_restarts import (
    EARNED_S,
    LONGEST_PAUSE_S,
    PAUSE_S,
    RESTARTS,
    after_end,
    without_replicas,
)
from launcher.host.judge.verdict import Verdict
from megatron_rl.contract.attempt_records import ReplicaState
from megatron_rl.contract.codes import CRASHED, FINISHED, MISCONFIGURED, REPLICA_GIVEN_UP, REPLICA_WAITING
from megatron_rl.contract.paths import REWARD, TEACHER

CRASH = Verdict(CRASHED, 7, "RuntimeError: boom", 0, "n3", "generate")


def pauses(*lived: float, verdict: Verdict = CRASH) -> list[float | None]:
    """Restarts of a replica that ends repeatedly, each time after the same life."""
    found, used = [], 0
    for seconds in lived:
        used, pause = after_end(used, seconds, verdict)
        found.append(pause)
    return found


def test_one_that_fails_again_and_again_is_given_up_after_ever_longer_pauses():
    assert pauses(*[1.0] * 6) == [5.0, 10.0, 20.0, 40.0, 80.0, None]


def test_one_that_would_end_so_again_is_not_started_again():
    assert pauses(1.0, verdict=CRASH._replace(outcome=MISCONFIGURED)) == [None]


def test_one_that_left_in_order_is_started_again_while_the_run_goes_on():
    assert pauses(1.0, verdict=Verdict(FINISHED)) == [PAUSE_S]


@given(st.lists(st.floats(0, 3 * EARNED_S), max_size=30))
def test_whoever_lives_long_enough_is_never_given_up(lived):
    found = pauses(*lived)
    if all(seconds >= EARNED_S for seconds in lived):
        assert set(found) <= {PAUSE_S}
    allowed = RESTARTS + sum(int(seconds // EARNED_S) for seconds in lived)
    assert None not in found[: RESTARTS - 1]
    assert sum(pause is not None for pause in found) <= allowed
    assert all(PAUSE_S <= pause <= LONGEST_PAUSE_S for pause in found if pause is not None)


def gone(number: int, misconfigured: bool = False, state: str = REPLICA_GIVEN_UP) -> ReplicaState:
    return ReplicaState(number, state, 6, 0.0, why=f"infer-{number} rank 0: boom", misconfigured=misconfigured)


@pytest.mark.parametrize(
    ("replicas", "outcome"),
    [
        ([gone(0), gone(1)], CRASHED),
        ([gone(0, True), gone(1)], CRASHED),
        ([gone(0, True), gone(1, True)], MISCONFIGURED),
    ],
)
def test_a_crash_without_a_replica_left_is_what_ended_them(replicas, outcome):
    found = without_replicas(CRASH, replicas)
    assert (found.outcome, found.step) == (outcome, 7)
    assert found.error == "no inference replica was left: infer-0 rank 0: boom"
    assert found.node is None, "the rank that trains, and its node, are not to blame"


@pytest.mark.parametrize(("kind", "model"), [(TEACHER, "teacher"), (REWARD, "reward model")])
def test_a_crash_without_a_replica_of_another_model_left_says_so(kind, model):
    found = without_replicas(CRASH, [gone(0, True)], kind)
    assert found.outcome == MISCONFIGURED
    assert found.error == f"no replica of the {model} was left: infer-0 rank 0: boom"


@pytest.mark.parametrize("replicas", [[], [gone(0), gone(1, state=REPLICA_WAITING)]])
def test_the_end_of_a_replica_is_never_the_runs_as_long_as_one_is_left(replicas):
    assert without_replicas(CRASH, replicas) == CRASH
    assert without_replicas(Verdict(FINISHED, 9), [gone(0)]) == Verdict(FINISHED, 9)
