"""Which host of an allocation does which step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.host.nodes import NotEnoughNodes, assign

PARTITIONED = {
    "nodes": 4,
    "steps": [
        {"name": "train", "nodes": [0, 1]},
        {"name": "infer-0", "nodes": [2]},
        {"name": "infer-1", "nodes": [3]},
    ],
}
HOSTS = ["n1", "n2", "n3", "n4", "n5"]


def test_steps_get_the_hosts_in_slurms_order():
    assignment = assign(PARTITIONED, HOSTS, {})
    assert assignment.steps == {"train": ["n1", "n2"], "infer-0": ["n3"], "infer-1": ["n4"]}
    assert assignment.spare == ["n5"]


def test_a_spare_node_stands_in_for_a_bad_one():
    assignment = assign(PARTITIONED, HOSTS, {"n2": "7 of 8 GPUs"})
    assert assignment.steps == {"train": ["n1", "n3"], "infer-0": ["n4"], "infer-1": ["n5"]}
    assert assignment.spare == []


def test_too_many_bad_nodes_are_named():
    with pytest.raises(NotEnoughNodes, match=r"4 nodes are needed, 3 of 5 are fit \(n2: 7 of 8 GPUs; n5: no answer\)"):
        assign(PARTITIONED, HOSTS, {"n5": "no answer", "n2": "7 of 8 GPUs"})


@given(st.integers(1, 20), st.data())
def test_every_host_is_used_once_is_spare_or_is_bad(needed, data):
    hosts = [f"n{i}" for i in range(needed + data.draw(st.integers(0, 5)))]
    bad = data.draw(st.sets(st.sampled_from(hosts), max_size=len(hosts) - needed))
    plan = {"nodes": needed, "steps": [{"name": "train", "nodes": list(range(needed))}]}
    assignment = assign(plan, hosts, dict.fromkeys(bad, "bad"))
    assert sorted([*assignment.steps["train"], *assignment.spare, *bad]) == sorted(hosts)
    assert assignment.steps["train"] == sorted(assignment.steps["train"], key=hosts.index)
