"""Nodes to blame if some pairs of nodes are slow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rank.fabric.findings import culprits, ring, rounds

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
