"""Simulated runs: invariants for random scenarios, and exact times where there is a formula."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.simulate.lengths import Lognormal
from launcher.simulate.run import simulate
from launcher.simulate.scenario import NEVER, Costs, DecodeSpeed, Faults, Scenario, Split, Work

COSTS = Costs(
    decode=DecodeSpeed(((1, 0.01), (8, 0.02)), 1e-6),
    rows=8,
    prefill_token_s=1e-4,
    train_token_s=1e-3,
    train_square_s=1e-7,
    training_replicas=2,
    step_s=0.5,
    refit_s=0.25,
    save_blocked_s=0.5,
    save_s=4.0,
)
WORK = Work(prompts=6, group_size=4, prompt_tokens=10, lengths=Lognormal.with_mean(100, 400))
PLAIN = Scenario(WORK, COSTS, Split(2, 2, 2))


def equal(tokens: int) -> Lognormal:
    """Lengths of answers that all have `tokens` tokens."""
    return Lognormal(tokens, 0.0, tokens)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    inference_nodes = draw(st.integers(0, 4))
    training_nodes = draw(st.integers(1, 3))
    replicas = draw(st.sampled_from([1, 2, 4])) * (inference_nodes or training_nodes)
    faults = Faults(
        preempted_every_s=draw(st.sampled_from([NEVER, 100.0])),
        grace_s=draw(st.sampled_from([0.0, 120.0])),
        queued_s=30.0,
        node_fails_every_s=draw(st.sampled_from([NEVER, 300.0])),
        restart_s=5.0,
        replica_restart_s=draw(st.sampled_from([1.0, 40.0])),
    )
    work = replace(WORK, prompts=draw(st.integers(1, 9)), group_size=draw(st.integers(2, 5)))
    return Scenario(
        work=work,
        costs=replace(
            COSTS,
            rows=draw(st.integers(1, 9)),
            training_replicas=training_nodes,
            refit_s=draw(st.sampled_from([0.0, 0.25, 9.0])),
            trains_beside_refit=draw(st.booleans()),
        ),
        split=Split(training_nodes, inference_nodes, replicas),
        max_lag=draw(st.integers(0, 3)) if inference_nodes else 0,
        save_every=draw(st.integers(1, 3)),
        faults=faults,
    )


@given(scenarios(), st.integers(0, 2**32))
def test_each_prompt_is_trained_once_in_order_and_within_the_lag_in_any_scenario(scenario, seed):
    done = simulate(scenario, 7, seed)
    work = scenario.work
    assert [ordinal for step in done.steps for ordinal in step.ordinals] == list(range(7 * work.prompts))
    for step in done.steps:
        ordinals = step.ordinals
        groups = [work.lengths.of_group(seed, ordinal, work.group_size) for ordinal in ordinals]
        assert step.tokens == sum(map(sum, groups))
        assert 0 <= step.staleness <= step.staleness_max + 1e-9
        assert step.staleness_max <= scenario.max_lag
    ends = [step.ended_at for step in done.steps]
    assert ends == sorted(ends)
    assert 0 < done.held_s <= done.seconds == ends[-1]
    for share in (done.idle_training, done.idle_inference, done.goodput):
        assert 0 <= share <= 1
    assert simulate(scenario, 7, seed) == done


@given(
    replicas=st.integers(1, 5),
    groups=st.integers(1, 4),
    tokens=st.integers(1, 300),
    colocated=st.booleans(),
    prompt=st.integers(1, 50),
)
def test_equal_answers_at_lag_0_take_the_time_of_the_formula(replicas, groups, tokens, colocated, prompt):
    """Every replica has the same number of groups of 2, all at once."""
    costs, split = COSTS, Split(1, 0, replicas) if colocated else Split(1, replicas, replicas)
    work = Work(groups * replicas, 2, prompt, equal(tokens))
    done = simulate(Scenario(work, costs, split), 3)
    rows, answers = 2 * groups, 2 * groups * replicas
    generated = prompt * groups * 1e-4 + tokens * costs.decode.step_s(rows)
    generated += 1e-6 * sum(rows * (prompt + token + 0.5) for token in range(tokens))
    trained = 0.5 + max(answers * (1e-3 * tokens + 1e-7 * tokens**2), 2 * (1e-3 * tokens + 1e-7 * tokens**2))
    for step in done.steps:
        assert step.ended_at == pytest.approx(step.number * (generated + trained + 0.25))
        assert (step.generated_s, step.trained_s) == (pytest.approx(generated), pytest.approx(trained))
        assert step.sent_s == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("beside", "refit_s", "step_s"),
    [
        (False, 2.0, 2.0 + 3.0),  # GPUs train after the weights have arrived
        (True, 2.0, 3.0),
        (True, 4.0, 4.0 + 0.5),  # the update waits for them
    ],
)
def test_sending_weights_delays_training_or_only_its_update(beside, refit_s, step_s):
    """Training takes 2.5 s plus an update of 0.5 s; generation is ahead and takes almost no time."""
    costs = replace(COSTS, decode=DecodeSpeed(((1, 1e-9),), 0.0), rows=99, prefill_token_s=0.0)
    costs = replace(costs, train_token_s=2.5 / 240, train_square_s=0.0, refit_s=refit_s, trains_beside_refit=beside)
    work = Work(prompts=6, group_size=4, prompt_tokens=10, lengths=equal(10))
    done = simulate(Scenario(work, costs, Split(2, 2, 2), max_lag=1), 6)
    for before, step in pairwise(done.steps):
        assert step.ended_at - before.ended_at == pytest.approx(step_s)
        assert (step.trained_s, step.sent_s) == (pytest.approx(3.0), pytest.approx(step_s - 3.0))


@given(steps=st.floats(0.01, 1e4), rows=st.integers(1, 20), cached=st.floats(0, 1e5))
def test_steps_is_the_inverse_of_seconds(steps, rows, cached):
    speed = COSTS.decode
    assert speed.steps(rows, cached, speed.seconds(rows, cached, steps)) == pytest.approx(steps, rel=1e-6)
    free = replace(speed, cached_token_s=0.0)
    assert free.steps(rows, cached, free.seconds(rows, cached, steps)) == pytest.approx(steps, rel=1e-6)


def test_decode_times_are_interpolated_and_extrapolated_linearly():
    speed = DecodeSpeed(((2, 0.1), (4, 0.2), (8, 0.2)), 0.0)
    assert [speed.step_s(rows) for rows in (1, 2, 3, 4, 6, 8, 16)] == pytest.approx(
        [0.1, 0.1, 0.15, 0.2, 0.2, 0.2, 0.2]
    )
    assert DecodeSpeed(((2, 0.1), (4, 0.2)), 0.0).step_s(6) == pytest.approx(0.3)


@given(seed=st.integers(0, 2**32), prompts=st.integers(1, 12), colocated=st.booleans())
def test_twice_the_nodes_are_never_slower_at_lag_0_if_they_scale_perfectly(seed, prompts, colocated):
    work = replace(WORK, prompts=prompts)
    few, many = (Split(2, 0, 2), Split(4, 0, 4)) if colocated else (Split(2, 2, 2), Split(4, 4, 4))
    halved = {"train_token_s": COSTS.train_token_s / 2, "train_square_s": COSTS.train_square_s / 2}
    costs = replace(COSTS, training_replicas=4, **halved)
    slower = simulate(Scenario(work, COSTS, few), 3, seed)
    assert simulate(Scenario(work, costs, many), 3, seed).seconds <= slower.seconds + 1e-6


def test_generation_that_runs_ahead_hides_the_shorter_phase():
    by_lag = [simulate(replace(PLAIN, max_lag=lag), 30) for lag in range(3)]
    assert by_lag[0].seconds > by_lag[1].seconds >= by_lag[2].seconds
    assert [one.staleness_max for one in by_lag] == [0, 1, 2]
    assert by_lag[2].seconds > sum(step.trained_s for step in by_lag[2].steps)


def test_co_located_ranks_that_run_ahead_begin_the_next_batch_behind_the_longest_answers():
    """Only the tail of each batch is gained: the ranks do not generate while they train."""
    work = replace(WORK, lengths=Lognormal.with_mean(30, 200))
    by_lag = [simulate(Scenario(work, COSTS, Split(2, 0, 2), max_lag=lag), 30) for lag in range(2)]
    assert by_lag[1].seconds < 0.95 * by_lag[0].seconds
    assert [one.staleness_max for one in by_lag] == [0, 1]
    busy = [one.train_s + one.refit_s + one.generate_s for one in by_lag]
    assert all(one.step_s >= 0.999 * seconds for one, seconds in zip(by_lag, busy, strict=True))


def test_a_lost_replica_loses_no_step_and_a_lost_trainer_those_since_the_checkpoint():
    faults = Faults(node_fails_every_s=400.0, restart_s=5.0, replica_restart_s=5.0)
    done = simulate(Scenario(WORK, COSTS, Split(1, 7, 7), max_lag=1, save_every=4, faults=faults), 60, seed=1)
    assert done.lost_replicas > done.attempts - 1 > 0
    assert 0 < done.repeated <= 8 * (done.attempts - 1)  # a save that is not yet published does not count


def test_a_preemption_with_notice_repeats_nothing_and_resumes_unfinished_answers():
    faults = Faults(preempted_every_s=40.0, grace_s=120.0, queued_s=100.0, restart_s=5.0)
    saved = simulate(replace(PLAIN, faults=faults), 20, seed=3)
    killed = simulate(replace(PLAIN, save_every=1, faults=replace(faults, grace_s=1.0)), 20, seed=3)
    assert saved.attempts > 2
    assert saved.repeated == 0 < killed.repeated
    assert saved.goodput > killed.goodput
    assert saved.seconds - saved.held_s == pytest.approx(100.0 * (saved.attempts - 1))


def test_replicas_are_lost_with_their_nodes():
    assert [list(Split(1, 2, 4).replicas_on(node)) for node in range(2)] == [[0, 1], [2, 3]]
    assert [list(Split(1, 4, 2).replicas_on(node)) for node in range(4)] == [[0], [0], [1], [1]]
