"""Nodes to blame if some pairs of nodes are slow."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.contract.attempt_records import AllReduce
from megatron_rl.rank.fabric.check import product_tflops
from megatron_rl.rank.fabric.findings import culprits, findings, ring, rounds, stragglers

NODES = st.integers(min_value=2, max_value=40)


@given(NODES)
def test_every_pair_in_the_ring_is_tried_once_and_no_node_twice_in_a_round(nodes):
    tried = rounds(nodes)
    assert sorted(edge for edges in tried for edge in edges) == sorted(ring(nodes))
    for edges in tried:
        ends = [node for edge in edges for node in edge]
        assert len(ends) == len(set(ends))
    assert len(tried) == (1 if nodes == 2 else 2 + nodes % 2)


def test_two_nodes_have_one_edge_and_one_has_none():
    assert ring(2) == [(0, 1)]
    assert ring(1) == rounds(1) == []


@given(st.integers(min_value=3, max_value=40), st.data())
def test_the_node_in_every_slow_pair_is_named(nodes, data):
    bad = data.draw(st.integers(min_value=0, max_value=nodes - 1))
    assert culprits(nodes, {edge for edge in ring(nodes) if bad in edge}) == [bad]


@given(st.integers(min_value=3, max_value=40), st.data())
def test_all_slow_pairs_are_explained_by_no_more_nodes_than_are_bad(nodes, data):
    bad = data.draw(st.sets(st.integers(min_value=0, max_value=nodes - 1)))
    slow = {edge for edge in ring(nodes) if bad & set(edge)}
    named = set(culprits(nodes, slow))
    if slow == set(ring(nodes)):
        assert named == set()
    else:
        assert all(named & set(edge) for edge in slow)
        assert len(named) <= len(bad)


@given(NODES, st.data())
def test_a_node_that_does_well_with_a_neighbour_is_never_named(nodes, data):
    slow = data.draw(st.sets(st.sampled_from(ring(nodes))))
    fine = {node for edge in ring(nodes) if edge not in slow for node in edge}
    assert not fine & set(culprits(nodes, slow))


def test_of_two_nodes_none_can_be_named():
    assert culprits(2, {(0, 1)}) == []


def test_a_gpu_that_computes_slowly_beside_the_others_condemns_its_node():
    hosts = ["a", "a", "b", "b"]
    answers = [AllReduce(300.0, tflops=tflops) for tflops in (700.0, 690.0, 480.0, 710.0)]
    slow = stragglers(hosts, answers)
    assert slow == {"b": "its GPU of rank 2 computes at 480 TFLOP/s, the others at 695"}
    assert findings(["a", "b"], AllReduce(300.0), {}, 100.0, 1.0, slow).bad == slow
    assert stragglers(hosts, [*answers[:2], None, AllReduce(error="no end")]) == {}
    assert stragglers(hosts, [AllReduce(1.0)] * 4) == {}, "on CPUs nothing is measured"


def test_the_matrix_products_are_timed():
    assert 0.0 < product_tflops(torch.device("cpu"), 64, lambda: None) < 100.0
