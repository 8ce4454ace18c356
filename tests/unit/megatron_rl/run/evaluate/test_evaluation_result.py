"""Result of an evaluation: which answers count, and where."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.trajectories import Problem
from megatron_rl.algorithms.evaluation_scores import EvaluationResult, result, set_result
from megatron_rl.contract.evaluation_records import GREEDY, SAMPLED, ProblemAnswers, ScoredAnswer
from megatron_rl.contract.shapes import from_json, to_json
from megatron_rl.run.evaluate.blocks import blocks
from megatron_rl.run.evaluate.evaluator import choose_sets

SETTINGS = {"k": 2, "compares_answers": True}


def answered(problem: int, rewards: Sequence[float], mode: str = SAMPLED, **failures: int) -> ProblemAnswers:
    answers = [ScoredAnswer(reward, 4, "length" if reward == 0.25 else "stop", "", str(reward)) for reward in rewards]
    return ProblemAnswers("held_out", mode, problem, answers, failures)


def test_lost_answers_are_counted_and_not_taken_as_wrong() -> None:
    found = set_result(
        [answered(0, [1.0, 0.0]), answered(1, [1.0], timeout=1), answered(2, [], timeout=2)], [], 2, True
    )
    assert (found.problems, found.answers, found.failures) == (3, 3, {"timeout": 3})
    assert found.scores["avg@2"][::2] == (0.75, 2)
    assert found.scores["pass@2"] == (1.0, None, 1)
    assert "greedy" not in found.scores


def test_partial_reward_is_not_correct_but_counts_in_the_mean() -> None:
    found = set_result([answered(0, [0.25, 0.25])], [answered(0, [1.0], GREEDY)], 2, True)
    assert {name: score.value for name, score in found.scores.items()} == {
        "greedy": 1.0,
        "pass@1": 0.0,
        "pass@2": 0.0,
        "avg@2": 0.0,
        "maj@2": 0.0,
        "mean_reward": 0.25,
        "tokens": 4.0,
        "cut_off": 1.0,
    }


def test_no_majority_without_comparable_answers() -> None:
    assert "maj@2" not in set_result([answered(0, [1.0, 0.0])], [], 2, False).scores


def test_result_does_not_depend_on_the_order_of_answers_and_survives_the_file() -> None:
    lines = [answered(problem, [1.0, problem / 7], reason=problem) for problem in range(5)]
    known = {(line.set, line.mode, line.problem): line for line in lines}
    found = result(SETTINGS, {"held_out": 5}, known, "a.jsonl")
    assert found == result(SETTINGS, {"held_out": 5}, dict(reversed(known.items())), "a.jsonl")
    assert from_json(EvaluationResult, to_json(found)) == found


@given(st.dictionaries(st.sampled_from("ab"), st.integers(0, 50)), st.integers(1, 40), st.integers(1, 64))
def test_blocks_contain_each_problem_once_and_fill_the_rows(sizes: dict[str, int], k: int, rows: int) -> None:
    modes = {SAMPLED: k, GREEDY: 1}
    found = list(blocks(sizes, modes, rows))
    places = [(block.set, block.mode, problem) for block in found for problem in block.problems]
    wanted = [(name, mode, problem) for name, size in sizes.items() for mode in modes for problem in range(size)]
    assert places == wanted
    for block, after in pairwise(found):
        if (block.set, block.mode) == (after.set, after.mode):
            assert len(block.problems) * modes[block.mode] >= 2 * rows


def test_sets_are_chosen_by_name_and_limited_and_must_not_be_empty() -> None:
    there = {"a": [Problem("1", {}), Problem("2", {})], "b": []}
    assert choose_sets(there, None, 1) == {"a": there["a"][:1], "b": []}
    assert choose_sets(there, ["a", "a"], None) == {"a": there["a"]}
    for names, said in (
        (["c"], "no such set; there are a, b"),
        (["b"], "no problems"),
        (None, "no evaluation problems"),
    ):
        with pytest.raises(ValueError, match=said):
            choose_sets({} if names is None else there, names, None)
