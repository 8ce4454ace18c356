"""Record of what a run is taught: counts over its prompts, and what its reward gives for right answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from core_helpers import ALPHABET
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.reward_only import RewardOnlyAgent
from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.run_records import RightAnswer
from megatron_rl.model.tokenizer import CharacterTokenizer
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.run import lesson
from megatron_rl.run.lesson import count_prompts, right_answer, right_answers


def test_what_all_prompts_share_is_no_part_of_their_length():
    counts = count_prompts(["<user>How many?<end>", "<user>Why?<end>", "<user><end>", "<user>Who?<end>"])
    assert (counts.empty, counts.longest, counts.at_longest, counts.lengths) == (1, 9, 1, 3)
    assert counts.at_another == 2  # "Why?" and "Who?"


def test_equal_prompts_are_counted_and_are_not_empty():
    counts = count_prompts(["<user>Add.<end>"] * 5)
    assert (counts.prompts, counts.distinct, counts.empty) == (5, 1, 0)
    assert count_prompts(["<u>1<e>", "<u>2<e>", "<u><e>", "<u><e>"])[:3] == (4, 3, 2)


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.text("<>", max_size=3), st.text("<>", max_size=3))
def test_a_template_around_the_prompts_changes_no_count(prompts: list[str], before: str, after: str):
    assert count_prompts([f"{before}{prompt}{after}" for prompt in prompts]) == count_prompts(prompts)


class Grader(RewardOnlyAgent):
    """Gives a tenth for an answer of one digit, and loses those of two."""

    def training_problems(self) -> Sequence[Problem]:
        return []

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return {}

    async def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: str) -> float:
        assert finish_reason == "stop"
        if len(response) > 1:
            raise ValueError("two digits")
        return 0.1


def scored(*problems: Problem, grader: type[RewardOnlyAgent] = Grader, **keys: Any) -> list[RightAnswer]:
    config: Any = SimpleNamespace(task=EnvironmentConfig(name="python", **keys))
    tokenizer = CharacterTokenizer(ALPHABET)
    return asyncio.run(right_answers(grader(None, tokenizer), problems, tokenizer, config))


def test_right_answers_are_scored_as_in_a_step():
    right = Problem("3+4=", {"answer": "7"})
    lost = Problem("9+8=", {"answer": "17"})
    unknown = Problem("9-8=", {})
    foreign = Problem("8-8=", {"answer": "zero"})  # letters that the tokenizer lacks
    first, second, third = scored(right, lost, unknown, foreign)
    assert first == RightAnswer("3+4=", "7", 0.1)
    assert (second.reward, second.why.endswith("ValueError: two digits")) == (None, True)
    assert third.reward is None and "'z'" in third.why


def test_a_component_says_whether_the_reward_calls_the_answer_of_the_data_right():
    class Styled(Grader):
        async def get_reward(self, *_: Any) -> dict[str, float]:
            return {"right": 1.0, "style": -0.2}

    problem = Problem("3+4=", {"answer": "7"})
    found = [scored(problem, grader=Styled, accuracy=name)[0] for name in ("right", "style", "other")]
    assert [one.reward for one in found] == [1.0, -0.2, None] and "no component other" in found[2].why


def test_an_answer_that_is_not_scored_in_time_is_lost(monkeypatch: pytest.MonkeyPatch):
    class Slow(Grader):
        async def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: str) -> float:
            await asyncio.sleep(60)
            return 1.0

    monkeypatch.setattr(lesson, "TRIAL_S", 0.05)
    (late,) = scored(Problem("3+4=", {"answer": "7"}), grader=Slow)
    assert (late.reward, late.why) == (None, "it took longer than 0.05 s")


def test_a_right_answer_that_the_environment_cannot_tell_is_unknown():
    class Broken(Grader):
        def gold_response(self, problem: Problem) -> str:
            raise KeyError("solution")

    tokenizer = CharacterTokenizer(ALPHABET)
    assert right_answer(Broken(None, tokenizer), Problem("3+4=", {"answer": "7"})) is None
    assert right_answer(None, Problem("3+4=", {})) is None
    assert right_answer(Grader(None, tokenizer), Problem("3+4=", {"answer": "7"})) == "7"
