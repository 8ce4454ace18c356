"""Two lists of problems have the same digest if they have the same prompts in the same order."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from megatron_rl.agent.problem_digest import ProblemDigest, differences
from megatron_rl.agent.trajectories import Problem

PROMPTS = st.lists(st.text("ab", max_size=2), max_size=3)


def digest(*prompts: str) -> ProblemDigest:
    return ProblemDigest.of([Problem(prompt, {}) for prompt in prompts])


@given(PROMPTS, PROMPTS)
@example(["ab", ""], ["a", "b"])
@example(["a", "b"], ["b", "a"])
def test_digest_changes_with_prompts_and_their_order(one: list[str], other: list[str]) -> None:
    assert (digest(*one) == digest(*other)) == (one == other)


def test_digest_depends_on_nothing_else_and_is_the_same_in_another_process() -> None:
    problems = [Problem("1+2=", {"answer": "3"}, "sums"), Problem("é\ud800", {"answer": {"4"}})]
    assert ProblemDigest.of(problems) == digest("1+2=", "é\ud800") == ProblemDigest(2, "7d3ec0eb17a3834b")


def test_differences_are_described_by_environment() -> None:
    expected = {"same": digest("a"), "fewer": digest("a", "b"), "others": digest("a", "b"), "gone": digest("a")}
    found = {"new": digest("a"), "same": digest("a"), "others": digest("b", "a"), "fewer": digest("a")}
    assert differences(expected, found) == [
        "environment 'fewer': 1 problems instead of 2",
        "environment 'others': 2 problems, but different ones or in another order",
        "environment 'gone': 0 problems instead of 1",
        "environment 'new': 1 problems instead of 0",
    ]
    assert differences(expected, dict(reversed(expected.items()))) == []
