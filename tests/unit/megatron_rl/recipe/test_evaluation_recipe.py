"""Keys of evaluations: which settings a set has, and which contradict one another."""

from __future__ import annotations

from typing import Any

import pytest
from core_helpers import tiny_run

from megatron_rl.recipe.evaluation_section import EvaluationConfig
from megatron_rl.recipe.inference import Sampling

REPLICAS = {"mode": "partitioned", "inference": {"nodes": 2, "tp": 1}}


def test_a_set_has_its_own_values_and_inherits_the_others() -> None:
    sets = {"held_out": {"samples": 4, "temperature": 0.5}, "trained": {"samples": 0, "every": 7}}
    asked = EvaluationConfig.model_validate({"every": 3, "samples": 16, "pass_at": [1, 8], "sets": sets})
    of = {name: asked.of(name) for name in ("held_out", "trained", "other")}
    assert [(one.every, one.samples, one.pass_at) for one in of.values()] == [
        (3, 4, (1,)),
        (7, 0, None),
        (3, 16, (1, 8)),
    ]
    training = Sampling(temperature=0.9, max_new_tokens=5, stop=("x",))
    assert of["held_out"].sampling(training) == Sampling(temperature=0.5, max_new_tokens=5, stop=("x",))
    assert of["other"].sampling(training) == training
    assert [step for step in range(15) if asked.any_due(step, 14)] == [0, 3, 6, 7, 9, 12, 14]


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        ({"greedy": False}, "evaluation: greedy is false and samples is 0"),
        ({"sets": {"a": {"greedy": False}}}, "evaluation.sets.a: greedy is false"),
        ({"pass_at": [1]}, "evaluation.pass_at is for sampled answers"),
        ({"samples": 4, "pass_at": [1, 8]}, "evaluation.pass_at has 8, and there are 4 answers"),
        ({"samples": 8, "sets": {"a": {"samples": 4, "pass_at": [8]}}}, "evaluation.sets.a.pass_at has 8"),
        ({"max_new_tokens": 999}, "evaluation.max_new_tokens 999 leaves no room"),
        ({"replicas": 1}, "placement.mode is colocated"),
    ],
)
def test_contradictions_are_refused_with_their_key(evaluation: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tiny_run(evaluation=evaluation)


def test_values_that_only_a_set_can_use_are_accepted() -> None:
    tiny_run(evaluation={"pass_at": [1, 8], "temperature": 0.6, "sets": {"held_out": {"samples": 8}}})


def test_some_replicas_must_take_newer_weights() -> None:
    tiny_run(job={"nodes": 3}, placement=REPLICAS, evaluation={"replicas": 1})
    with pytest.raises(ValueError, match="the run has 2 "):
        tiny_run(job={"nodes": 3}, placement=REPLICAS, evaluation={"replicas": 2})
