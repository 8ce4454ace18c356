"""Settings of an evaluation: answers that were kept with other settings are not reused."""

from __future__ import annotations

from typing import Any

from megatron_rl.agent.trajectories import Problem
from megatron_rl.run.evaluate.evaluator import golden_digest


def of(**golden: Any) -> str:
    return golden_digest([Problem("1 + 1 =", golden)])


def test_corrected_golden_answer_changes_the_digest() -> None:
    assert of(answer="2") == of(answer="2") != of(answer="3")
    assert of(answer=["\ud800", None]) != of(answer=["\ud800", 0])


def test_values_without_a_stable_text_count_by_their_type() -> None:
    assert of(task=object(), numbers={2: {"a", "b"}}) == of(task=object(), numbers={2: {"b"}})
    assert of(task=object()) != of(task=set())
