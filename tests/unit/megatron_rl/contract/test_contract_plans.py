"""plan.json: the steps of a plan on any of its numbers of nodes, and plans that an older mrl wrote or reads."""

from __future__ import annotations

import json

from megatron_rl.contract.plan_records import PlanRecord, PlanRole, PlanStep, counts_of, listed, steps_of
from megatron_rl.contract.records import decode
from megatron_rl.contract.shapes import to_json

ROLES = [
    PlanRole("train", 0, 3, None, 8),
    PlanRole("infer", -3, 1, 4, 1, of="-infer"),
    PlanRole("teacher", -1, 0, 8, 8),
]
PLAN = PlanRecord(6, 8, 1, ROLES, smaller=[5])
STEPS_OF_FIVE = [
    PlanStep("train", [0, 1], 8, 8),
    *(PlanStep(f"infer-{replica}", [2 + replica // 2], 1, 4, "-infer") for replica in range(4)),
    PlanStep("teacher-0", [4], 8, 8),
]


def test_a_role_says_who_does_what_on_any_number_of_nodes():
    assert counts_of(PLAN) == [6, 5]
    assert steps_of(PLAN, 5) == STEPS_OF_FIVE
    assert [step.nodes for step in steps_of(PLAN, 6)] == [[0, 1, 2], [3], [3], [4], [4], [5]]


def test_a_replica_may_be_several_whole_nodes():
    plan = PlanRecord(6, 8, 0, [PlanRole("train", 0, 4, None, 8), PlanRole("infer", -4, 0, 16, 1)])
    assert [(step.name, step.nodes, step.gpus_per_node) for step in steps_of(plan, 6)[1:]] == [
        ("infer-0", [2, 3], 8),
        ("infer-1", [4, 5], 8),
    ]


def test_a_plan_that_an_older_mrl_listed_has_the_same_steps():
    step = {"name": "train", "nodes": [0, 1], "tasks_per_node": 8, "gpus_per_node": 8, "of": "", "gpu_offset": 0}
    smaller = {"nodes": 1, "steps": [{**step, "nodes": [0]}], "memory": []}
    text = json.dumps(
        {"version": 1, "nodes": 2, "gpus_per_node": 8, "spare_nodes": 0, "steps": [step], "alternatives": [smaller]}
    )
    plan = decode(PlanRecord, text.encode(), "plan.json")
    assert isinstance(plan, PlanRecord)
    assert counts_of(plan) == [2, 1]
    assert [step.nodes for step in steps_of(plan, 2)] == [[0, 1]]
    assert [step.nodes for step in steps_of(plan, 1)] == [[0]]


def test_code_of_an_older_mrl_gets_lists_and_refuses_a_plan_without_them():
    plain = to_json(listed(PLAN))
    assert [len(plain["steps"]), [each["nodes"] for each in plain["alternatives"]]] == [6, [5]]
    assert plain["alternatives"][0]["steps"] == [to_json(step) for step in STEPS_OF_FIVE]
    assert steps_of(listed(PLAN), 5) == STEPS_OF_FIVE
    assert "steps" not in to_json(PLAN), "it needs this key"
