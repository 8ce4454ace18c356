"""Closed forms of a step: exact for equal answers, and what holds for any."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.costs import Costs, DecodeSpeed, Scenario, Split, Work
from launcher.plan.lengths import Lognormal
from launcher.plan.pace import pace

COSTS = Costs(
    decode=DecodeSpeed(((1, 0.01), (8, 0.02)), 1e-6),
    rows=8,
    prefill_token_s=1e-4,
    train_token_s=1e-3,
    train_square_s=1e-7,
    training_replicas=2,
    step_s=0.5,
    refit_s=0.25,
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
    costs = replace(
        COSTS,
        rows=draw(st.integers(1, 200)),
        training_replicas=training_nodes,
        refit_s=draw(st.sampled_from([0.0, 0.25, 9.0])),
        trains_beside_refit=draw(st.booleans()),
    )
    lengths = Lognormal.with_mean(draw(st.floats(1, 300)), 400)
    work = replace(WORK, prompts=draw(st.integers(1, 90)), group_size=draw(st.integers(2, 5)), lengths=lengths)
    return Scenario(work, costs, Split(training_nodes, inference_nodes, replicas), draw(st.integers(0, 3)))


@given(scenarios())
def test_a_step_is_at_least_each_of_its_bounds_and_at_most_its_parts_one_after_the_other(scenario):
    found, alone = pace(scenario), pace(replace(scenario, max_lag=0))
    assert alone.step_s == pytest.approx(alone.alone_s)
    assert found.train_s + found.refit_s <= found.step_s * (1 + 1e-9)
    assert found.generate_s <= found.step_s * (1 + 1e-9)
    assert found.step_s <= 1.1 * found.alone_s + scenario.costs.refit_s
    for share in (found.idle_training, found.idle_inference, found.busy):
        assert 0 <= share <= 1


@given(
    replicas=st.integers(1, 5),
    groups=st.integers(1, 4),
    tokens=st.integers(1, 300),
    colocated=st.booleans(),
    prompt=st.integers(1, 50),
)
def test_equal_answers_at_lag_0_take_the_time_of_the_sum(replicas, groups, tokens, colocated, prompt):
    """Every replica has the same number of groups of 2, all at once."""
    costs, split = COSTS, Split(1, 0, replicas) if colocated else Split(1, replicas, replicas)
    work = Work(groups * replicas, 2, prompt, equal(tokens))
    found = pace(Scenario(work, costs, split))
    rows, answers = 2 * groups, 2 * groups * replicas
    generated = prompt * groups * 1e-4 + tokens * costs.decode.step_s(rows)
    generated += 1e-6 * sum(rows * (prompt + token + 0.5) for token in range(tokens))
    trained = 0.5 + max(answers * (1e-3 * tokens + 1e-7 * tokens**2), 2 * (1e-3 * tokens + 1e-7 * tokens**2))
    assert (found.generate_s, found.train_s) == (pytest.approx(generated), pytest.approx(trained))
    assert found.refit_s == pytest.approx(0.25)
    assert found.step_s == pytest.approx(generated + trained + 0.25)


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
    found = pace(Scenario(work, costs, Split(2, 2, 2), max_lag=1))
    assert found.step_s == pytest.approx(step_s)
    assert (found.train_s, found.refit_s) == (pytest.approx(3.0), pytest.approx(step_s - 3.0))


def test_rows_bound_the_throughput_of_many_answers():
    """1,024 answers of 100 tokens on 8 rows: 12,800 decode steps, however far generation runs ahead."""
    costs = replace(COSTS, prefill_token_s=0.0, train_token_s=0.0, train_square_s=0.0)
    work = Work(prompts=256, group_size=4, prompt_tokens=10, lengths=equal(100))
    each = costs.decode.step_s(8) + 8 * 1e-6 * (10 + 50)
    for lag in (0, 1, 3):
        found = pace(Scenario(work, costs, Split(1, 1, 1), lag))
        assert found.generate_s == pytest.approx(12_800 * each, rel=1e-3)


def test_the_longest_answers_bound_the_latency_of_a_batch_with_rows_to_spare():
    """The limit of 400 tokens, which some of 2,400 answers reach, takes 400 decode steps: 4 s."""
    costs = replace(COSTS, decode=DecodeSpeed(((1, 0.01),), 0.0), rows=10_000, prefill_token_s=0.0)
    costs = replace(costs, train_token_s=0.0, train_square_s=0.0)
    work = replace(WORK, prompts=600)
    by_lag = [pace(Scenario(work, costs, Split(1, 1, 1), lag)) for lag in range(4)]
    beside_s = costs.step_s + costs.refit_s
    for lag, found in enumerate(by_lag):
        assert found.step_s == pytest.approx((4.0 + beside_s) / (1 + lag), rel=0.03)


def test_decode_times_are_interpolated_and_extrapolated_linearly():
    speed = DecodeSpeed(((2, 0.1), (4, 0.2), (8, 0.2)), 0.0)
    assert [speed.step_s(rows) for rows in (1, 2, 3, 4, 6, 8, 16)] == pytest.approx(
        [0.1, 0.1, 0.15, 0.2, 0.2, 0.2, 0.2]
    )
    assert DecodeSpeed(((2, 0.1), (4, 0.2)), 0.0).step_s(6) == pytest.approx(0.3)


def test_co_located_ranks_that_run_ahead_begin_the_next_batch_behind_the_longest_answers():
    """Only the tail of each batch is gained: the ranks do not generate while they train."""
    work = replace(WORK, lengths=Lognormal.with_mean(30, 200))
    by_lag = [pace(Scenario(work, COSTS, Split(2, 0, 2), lag)) for lag in range(2)]
    assert by_lag[1].step_s < 0.95 * by_lag[0].step_s
    busy = [one.train_s + one.refit_s + one.generate_s for one in by_lag]
    assert all(one.step_s >= 0.999 * seconds for one, seconds in zip(by_lag, busy, strict=True))
