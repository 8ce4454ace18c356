"""What an evaluation's scores depend on: answers that were kept under other ones are not its own."""

from __future__ import annotations

from typing import Any

from megatron_rl.agent.trajectories import Problem
from megatron_rl.evaluate.settings import golden_digest


def of(**golden: Any) -> str:
    return golden_digest([Problem("1 + 1 =", golden)])


def test_a_right_answer_that_was_mended_is_another_one() -> None:
    assert of(answer="2") == of(answer="2") != of(answer="3")
    assert of(answer=["\ud800", None]) != of(answer=["\ud800", 0])


def test_what_has_no_text_that_lasts_counts_by_its_type() -> None:
    assert of(task=object(), numbers={2: {"a", "b"}}) == of(task=object(), numbers={2: {"b"}})
    assert of(task=object()) != of(task=set())
