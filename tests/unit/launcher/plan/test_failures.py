"""Expected time of a run with failures."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from test_pace import COSTS, PLAIN

from launcher.plan.costs import Split
from launcher.plan.failures import Faults, expect
from launcher.plan.pace import pace

SAVING = replace(PLAIN, costs=replace(COSTS, save_blocked_s=0.5, save_s=4.0))
STEADY = pace(SAVING)


def test_a_run_without_failures_takes_its_steps_and_its_saves():
    run = expect(SAVING, STEADY, Faults(), steps=60, save_every=10)
    assert run.seconds == pytest.approx(60 * STEADY.step_s + 6 * 0.5)
    assert (run.attempts, run.repeated, run.lost_replicas) == (1, pytest.approx(0), 0)
    assert run.goodput == pytest.approx(STEADY.busy * STEADY.step_s / run.step_s)


def test_steps_are_repeated_from_the_newest_checkpoint_as_often_as_in_drawn_failures():
    """The same run, failure by failure: all nodes train, and a save is published at once."""
    scenario = replace(SAVING, split=Split(4, 0, 4), costs=replace(COSTS, save_blocked_s=0.0, save_s=0.0))
    steady, every = pace(scenario), 10
    faults = Faults(node_fails_every_s=4 * 100.0, restart_s=30.0)
    run = expect(scenario, steady, faults, steps=4000, save_every=every)
    chance, seconds, attempts = Random(3), 0.0, 1
    for _ in range(4000 // every):
        while (fails_after := chance.expovariate(1 / 100)) < every * steady.step_s:
            seconds += fails_after + 30 + scenario.costs.refit_s
            attempts += 1
        seconds += every * steady.step_s
    assert run.seconds == pytest.approx(seconds, rel=0.05)
    assert run.attempts == pytest.approx(attempts, rel=0.1)
    assert run.repeated * steady.step_s == pytest.approx(
        seconds - (attempts - 1) * 30.25 - 4000 * steady.step_s, rel=0.1
    )


def test_a_preemption_with_notice_repeats_nothing():
    faults = Faults(preempted_every_s=400.0, grace_s=120.0, queued_s=100.0, restart_s=5.0)
    saved = expect(SAVING, STEADY, faults, 200)
    killed = expect(SAVING, STEADY, replace(faults, grace_s=1.0), 200)
    assert saved.repeated == 0 < killed.repeated
    assert saved.goodput > killed.goodput
    assert saved.seconds - 200 * saved.step_s == pytest.approx(100.0 * (saved.attempts - 1))


def test_a_lost_inference_node_costs_less_than_a_lost_training_node():
    faults = Faults(node_fails_every_s=2000.0, restart_s=5.0, replica_restart_s=5.0)
    few, many = (
        expect(scenario, pace(scenario), faults, 500)
        for scenario in (replace(SAVING, split=Split(training, 8 - training, 8 - training)) for training in (1, 7))
    )
    assert few.lost_replicas > many.lost_replicas > 0
    assert few.attempts < many.attempts


@pytest.mark.parametrize("hours", [0.1, 1, 24])
def test_the_automatic_interval_between_saves_is_about_the_best(hours):
    faults = Faults(node_fails_every_s=hours * 3600 * 4)
    chosen = expect(SAVING, STEADY, faults, 100)
    best = min((expect(SAVING, STEADY, faults, 100, round(1.3**power)).seconds) for power in range(2, 18))
    assert chosen.seconds < 1.02 * best
    assert math.isfinite(best)
