"""The assignment of an allocation's hosts to steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.host.judge.nodes import (
    NOT_UNPACKED,
    NodeReports,
    NotEnoughNodes,
    assign,
    replaced,
    to_exclude,
    unfit_nodes,
)
from launcher.host.slurm.formats import is_dead
from megatron_rl.contract.attempt_records import FabricReport, NodeHealth
from megatron_rl.contract.plan_records import PlanRecord, PlanRole

PARTITIONED = PlanRecord(4, 8, 1, [PlanRole("train", 0, 2, None, 8), PlanRole("infer", -2, 0, 8, 8)])
HOSTS = ["n1", "n2", "n3", "n4", "n5"]


def colocated(*counts: int, spare: int = 0) -> PlanRecord:
    """The plan of a range in which these counts work, the largest first."""
    return PlanRecord(counts[0], 8, spare, [PlanRole("train", 0, 0, None, 8)], list(counts[1:]))


def test_steps_get_the_hosts_in_slurms_order():
    assignment = assign(PARTITIONED, HOSTS, {})
    assert assignment.steps == {"train": ["n1", "n2"], "infer-0": ["n3"], "infer-1": ["n4"]}
    assert assignment.spare == ["n5"]


def test_a_spare_node_stands_in_for_a_bad_one():
    assignment = assign(PARTITIONED, HOSTS, {"n2": "7 of 8 GPUs"})
    assert assignment.steps == {"train": ["n1", "n3"], "infer-0": ["n4"], "infer-1": ["n5"]}
    assert assignment.spare == []


def test_a_spare_node_stands_in_for_that_of_a_replica_which_died():
    before = assign(PARTITIONED, HOSTS, {})
    assert replaced(before, "infer-0", []) == before
    after = replaced(before, "infer-0", ["n3"])
    assert after.steps == {"train": ["n1", "n2"], "infer-0": ["n5"], "infer-1": ["n4"]}
    assert (after.spare, after.bad) == ([], {"n3": "died in the attempt"})
    assert replaced(after, "infer-1", ["n4"]) == after, "there is none left"
    assert replaced(before, "infer-0", ["n3", "n5"]) == before, "the spare one has died too"


def test_a_replica_beside_ranks_keeps_their_node_although_there_is_a_spare_one():
    roles = [PlanRole("train", 0, 0, None, 8), PlanRole("infer", 0, 0, 4, 1, shares_devices=True)]
    before = assign(PlanRecord(2, 8, 1, roles), HOSTS[:3], {})
    assert before.steps == {"train": ["n1", "n2"]} | {f"infer-{k}": [f"n{1 + k // 2}"] for k in range(4)}
    assert before.spare == ["n3"]
    assert replaced(before, "infer-2", ["n2"]) == before, "the attempt ends with the ranks of the node"


def test_too_many_bad_nodes_are_named():
    with pytest.raises(NotEnoughNodes, match=r"4 nodes are needed, 3 of 5 are fit \(n2: 7 of 8 GPUs; n5: no answer\)"):
        assign(PARTITIONED, HOSTS, {"n5": "no answer", "n2": "7 of 8 GPUs"})


@given(st.integers(1, 20), st.data())
def test_every_host_is_used_once_is_spare_or_is_bad(needed, data):
    hosts = [f"n{i}" for i in range(needed + data.draw(st.integers(0, 5)))]
    bad = data.draw(st.sets(st.sampled_from(hosts), max_size=len(hosts) - needed))
    assignment = assign(colocated(needed), hosts, dict.fromkeys(bad, "bad"))
    assert sorted([*assignment.steps["train"], *assignment.spare, *bad]) == sorted(hosts)
    assert assignment.steps["train"] == sorted(assignment.steps["train"], key=hosts.index)


RANGE = colocated(8, 6, 4)  # 5 and 7 give no layout


@pytest.mark.parametrize(
    ("there", "bad", "working", "spare"),
    [
        (8, 0, 8, 0),
        (7, 0, 6, 1),
        (8, 1, 6, 1),
        (8, 2, 6, 0),
        (8, 3, 4, 1),
        (4, 0, 4, 0),
        (9, 0, 8, 1),  # somebody's own allocation
    ],
)
def test_a_range_takes_the_largest_count_that_works_on_the_fit_nodes(there, bad, working, spare):
    hosts = [f"n{i}" for i in range(there)]
    assignment = assign(RANGE, hosts, dict.fromkeys(hosts[:bad], "sick"))
    assert assignment.working == len(assignment.steps["train"]) == working
    assert len(assignment.spare) == spare


def test_a_range_has_its_least_too():
    with pytest.raises(NotEnoughNodes, match=r"4 nodes are needed, 3 of 5 are fit"):
        assign(RANGE, HOSTS, {"n1": "sick", "n2": "sick"})


@pytest.mark.parametrize(
    ("given", "there", "bad", "working"),
    [
        (9, 9, 0, 8),
        (7, 7, 0, 6),  # a spare node stays one however many there are
        (7, 7, 1, 6),  # and stands in first
        (7, 7, 2, 5),
        (7, 6, 0, 6),  # also where Slurm has taken a dead one out of the allocation
        (5, 5, 0, 4),
        (4, 4, 0, 4),  # somebody's own allocation, without room for one
    ],
)
def test_spare_nodes_of_a_range_stand_in_before_it_shrinks(given, there, bad, working):
    hosts = [f"n{i}" for i in range(there)]
    plan = colocated(8, 7, 6, 5, 4, spare=1)
    assert assign(plan, hosts, dict.fromkeys(hosts[:bad], "sick"), given).working == working


@pytest.mark.parametrize(
    ("state", "dead"),
    [("idle", False), ("allocated", False), ("draining", False), ("allocated*", True), ("down", True), ("down*", True)],
)
def test_a_dead_node_is_told_by_slurms_word_for_it(state, dead):
    assert is_dead(state) == dead


def test_bad_are_nodes_that_say_so_that_say_nothing_and_that_slow_the_others():
    well = NodeHealth("a", 0.0, True, [])
    nodes = {host: well._replace(host=host) for host in "acd"}
    nodes["b"] = NodeHealth("b", 0.0, False, ["7 of 8 GPUs are there", "/dev/shm is full"])
    fabric = FabricReport(["a", "c"], {"c": "its all-reduce with a is slow"})
    bad = unfit_nodes(NodeReports(nodes, {"f": "is torn"}, fabric), ["a", "b", "c", "d", "e", "f"])
    assert set(bad) == {"b", "c", "d", "e", "f"}
    assert bad["b"] == "7 of 8 GPUs are there; /dev/shm is full"
    assert bad["c"] == "its all-reduce with a is slow"
    assert "did not come" in bad["d"]
    assert "no report" in bad["e"]
    assert bad["f"] == "its report is torn"
    assert set(unfit_nodes(NodeReports(nodes), ["a", "b", "c", "d"])) == {"b"}


def test_a_node_is_not_excluded_the_first_time_that_it_does_not_come_to_the_all_reduce():
    nodes = {name: NodeHealth(name, 0.0, name != "c", ["3 of 8 GPUs are there"]) for name in ("a", "b", "c")}
    unfit = unfit_nodes(NodeReports(nodes, {}, FabricReport(["a"], {})), ["a", "b", "c"])
    assert set(unfit) == {"b", "c"}, "it is not used"
    assert to_exclude(unfit, before=[]) == ["c"]
    assert to_exclude(unfit, before=["b"]) == ["b", "c"]


def test_a_node_where_unpacking_was_killed_once_is_not_excluded_and_one_without_room_is():
    unfit = {"b": f"{NOT_UNPACKED}Killed", "c": f"{NOT_UNPACKED}write failed because No space left on device"}
    assert to_exclude(unfit, before=[]) == ["c"]
    assert to_exclude(unfit, before=["b"]) == ["b", "c"]


def test_a_node_whose_network_has_lost_a_link_is_not_used():
    well = NodeHealth("a", 0.0, True, [], network_gbps=3200.0)
    nodes = {**{host: well._replace(host=host) for host in "abc"}, "d": well._replace(host="d", network_gbps=2800.0)}
    said = "its network has 2800 Gb/s, most nodes have 3200"
    assert unfit_nodes(NodeReports(nodes), ["a", "b", "c", "d"]) == {"d": said}
    assert unfit_nodes(NodeReports({host: nodes[host] for host in "ad"}), ["a", "d"]) == {}, (
        "of two none is the usual one"
    )
