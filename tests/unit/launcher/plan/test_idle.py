"""Idle shares of a partitioned run, and the split that should be faster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.idle import Idle, better_split, idle_shares
from megatron_rl.contract.attempt_records import MetricsLine


def line(**values: float) -> MetricsLine:
    usual = {"time/step_s": 10.0, "time/generate_s": 6.0, "time/wait_s": 1.0, "system/replica_busy_mean": 0.5}
    return MetricsLine(1, {**usual, **values})


def test_idle_shares_are_means_over_the_steps_that_record_replicas():
    found = idle_shares([line(), MetricsLine(2, {"time/step_s": 99.0}), line(staleness_max=1)])
    assert found == Idle(steps=2, step_s=10.0, training=0.7, inference=0.5, ahead=True)
    assert idle_shares([MetricsLine(1, {"time/step_s": 10.0})]) is None
    assert idle_shares([]) is None


@pytest.mark.parametrize(
    ("training", "inference", "ahead", "better"),
    [
        (0.7, 0.0, True, (2, 6)),  # trainers wait: 1.2 nodes' worth of training, 4 of generation
        (0.0, 0.8, True, (6, 2)),
        (0.1, 0.1, True, None),
        (0.9, 0.1, False, (2, 6)),  # one after the other: in proportion to the square roots of their work
        (0.5, 0.5, False, None),
    ],
)
def test_nodes_move_to_the_slower_role(training, inference, ahead, better):
    found = better_split(Idle(20, 10.0, training, inference, ahead), 8, 4)
    assert (found and found[:2]) == better


@given(
    st.integers(2, 64).flatmap(lambda nodes: st.tuples(st.just(nodes), st.integers(1, nodes - 1))),
    st.floats(0.01, 0.99),
    st.floats(0.0, 0.99),
    st.booleans(),
)
def test_a_suggested_split_uses_all_nodes_and_saves_time(split, training, inference, ahead):
    nodes, inference_nodes = split
    found = better_split(Idle(1, 1.0, training, inference, ahead), nodes, inference_nodes)
    if found is not None:
        assert found.training_nodes + found.inference_nodes == nodes
        assert min(found[:2]) >= 1
        assert found.inference_nodes != inference_nodes
        assert 0.1 <= found.saves < 1
