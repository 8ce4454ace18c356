"""Facts about recorded groups: unrewarded right answers, rewards that follow length, learned ends, missing formats."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from launcher.explain.group_facts import Formats, ends_with, explained_by_length, facts_of, formats_of
from megatron_rl.contract.rollout_records import AnswerLine, GroupLine, SequenceLine


def row(*learned: int) -> AnswerLine:
    """A row of data with two tokens of context."""
    count = len(learned)
    none = [0.0] * (count + 2)
    trained = [False] * 2 + [True] * count
    return AnswerLine(
        "row",
        [SequenceLine([5, 6, *learned], [""] * (count + 2), [[2, count + 2]], trained, none, none, [-1] * (count + 2))],
    )


def answer(text: str, prompt: str = "", calls: int | None = None) -> AnswerLine:
    sequence = SequenceLine([1, 2], [prompt, text], [[1, 2]], [False, True], [0.0, -1.0], [0.0, -1.0], [-1, 3])
    return AnswerLine(text, [sequence], tool_calls=calls)


def group(
    rewards: Sequence[float],
    lengths: Sequence[int] = (),
    answers: Sequence[AnswerLine] = (),
    reasons: Sequence[str] = (),
    right: str | None = None,
) -> GroupLine:
    mean = sum(rewards) / len(rewards)
    count = len(rewards)
    return GroupLine(
        *(1, 0, "p", "prompt", [*rewards], [reward - mean for reward in rewards]),
        lengths=[*lengths] or [10] * count,
        finish_reasons=[*reasons] or ["stop"] * count,
        lowest_version=0,
        highest_version=0,
        answers=[*answers],
        right=right,
    )


def asked(prompt: str, *texts: str, calls: int | None = None, reasons: tuple[str, ...] = ()) -> GroupLine:
    """A group of answers to a prompt that is longer than the record's field for it."""
    answers = [answer(text, f"{'x' * 500} {prompt}", calls) for text in texts]
    ends = [*reasons, *["stop"] * (len(texts) - len(reasons))]
    return group([0.0] * len(texts), answers=answers, reasons=ends)._replace(prompt="x" * 400)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("so it is 42", "42"),
        ("The answer is **42**.", "42"),
        ("\\boxed{42}.", "42"),
        ("it is 42", "\\boxed{42}"),
        ("<answer>Yes</answer>, I mean yes!", "<answer>yes</answer>"),
        ("x = -1", "-1"),
        ("it is 42", "We add.\n#### 42"),
        ("therefore $\\frac{1}{2}$", "\\boxed{\\frac{1}{2}}"),
    ],
)
def test_a_text_ends_with_the_right_answer_in_whatever_format(text: str, right: str):
    assert ends_with(text, right)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("142", "42"),
        ("-42", "42"),
        ("3/42", "42"),
        ("1.42", "42"),
        ("42 apples", "42"),
        ("42", ""),
        ("", "42"),
        ("", ""),
    ],
)
def test_a_part_of_another_number_is_not_the_right_answer(text: str, right: str):
    assert not ends_with(text, right)


def test_right_answers_that_earned_less_than_1_are_counted():
    texts = ["it is 42", "42", "it is 41", "hm 42"]
    found = facts_of([group([0.0, 1.0, 0.0, 0.2], answers=[answer(text) for text in texts], right="42")])
    assert (found.missed, found.unrewarded, found.example) == (3, 2, "it is 42")


def test_cut_answers_and_problems_without_a_right_answer_count_nothing():
    answers = [answer("it is 42")] * 2
    cut = group([0.0, 0.0], answers=answers, reasons=["length", "length"], right="42")
    assert facts_of([cut, group([0.0, 0.0], answers=answers)]).missed == 0


def test_the_length_explains_a_reward_that_is_a_function_of_it():
    chance = random.Random(1)
    lengths = [chance.randrange(1, 900) for _ in range(640)]
    assert explained_by_length([(length, float(length < 300)) for length in lengths]) > 0.95
    assert explained_by_length([(length, length / 900) for length in lengths]) > 0.95
    assert abs(explained_by_length([(length, float(chance.random() < 0.4)) for length in lengths])) < 0.1


def test_equal_rewards_or_few_answers_explain_nothing():
    assert explained_by_length([(length, 1.0) for length in range(100)]) == 0.0
    assert explained_by_length([(3, 0.0), (5, 1.0)]) == 0.0
    assert explained_by_length([]) == 0.0


def test_advantages_are_compared_with_lengths_within_their_groups():
    longer = [group([0.0, 0.5, 1.0], lengths=[base, base + 5, base + 10]) for base in (10, 500)]
    found = facts_of(longer)
    assert (found.advantages, found.correlation) == (6, pytest.approx(1.0))
    other_groups = [group([0.0, 0.0], lengths=[10, 10]), group([1.0, 1.0], lengths=[500, 500])]
    assert facts_of(other_groups).correlation == 0.0


def test_learned_tokens_that_only_end_a_row_are_counted():
    found = facts_of([group([0.0], answers=[row(7)]), group([0.0], answers=[row(8, 9, 7, 7)])])
    assert (found.rows, found.learned, found.ends) == (2, 5, 3)


def test_the_format_that_the_prompt_requests_is_looked_for():
    boxed = asked("Put the answer into \\boxed{}.", "so \\boxed{3}", "it is 3", "it is 4")
    tags = asked("Answer in <answer></answer>.", "<ANSWER>3</ANSWER>", "<answer>4")
    line = asked("End with a line Answer: 42", "answer: 3", "3")
    assert formats_of([boxed, tags, line]) == Formats(requested=7, missing=3, format="\\boxed")


def test_a_prompt_without_a_request_cut_answers_and_groups_without_tokens_count_nothing():
    assert formats_of([asked("3+4=", "7", "8"), asked("\\boxed{}", "3")._replace(answers=[])]) == Formats()
    assert formats_of([asked("\\boxed{}", "It is", "so \\boxed{1}", reasons=("length",))]) == Formats(requested=1)


def test_a_call_that_called_nothing_did_not_parse():
    broken = asked("3+4=", "<tool_call>{broken", "it is 7", "[TOOL_CALLS] []", calls=0)
    right = asked("3+4=", "<tool_call>{}</tool_call> 7", calls=1)
    without_tools = asked("3+4=", "<tool_call>{broken")
    assert formats_of([broken, right, without_tools]) == Formats(offered=4, unparsed=2)
