"""The lesson on the page: first and last recorded step, or the first rows of data."""

from __future__ import annotations

from typing import Any

from launcher.report.page_rollouts import collect
from launcher.report.shown_lesson import MOST_ROWS, MOST_TOKENS, lesson_of, passage
from megatron_rl.contract.rollout_records import AnswerLine, GroupLine, SequenceLine


def sequence(prompt: list[str], answer: list[str], version: int = 3) -> SequenceLine:
    pieces = [*prompt, *answer]
    scores = [0.0] * len(pieces)
    trained = [False] * len(prompt) + [True] * len(answer)
    versions = [-1] * len(prompt) + [version] * len(answer)
    turns = [[len(prompt), len(pieces)]]
    return SequenceLine([*range(len(pieces))], pieces, turns, trained, scores, scores, versions)


def group(step: int, rewards: list[float], version: int = 3, **fields: Any) -> GroupLine:
    answers = [
        AnswerLine("a", [sequence(["<s>", "2+2", "=\n"], [f"{at}", "<end>"], version)]) for at in range(len(rewards))
    ]
    counts, ends = [2] * len(rewards), ["stop"] * len(rewards)
    return GroupLine(step, step, "p", "2+2=", rewards, rewards, counts, ends, 3, 3, answers=answers, **fields)


def test_the_best_and_the_worst_answer_of_the_first_and_of_the_last_step_are_shown():
    lesson = lesson_of([group(1, [0.5, 0.0, 1.0], right="4")], [group(30, [1.0, 1.0])])
    assert lesson is not None
    first, last = lesson.problems
    assert (first.step, first.right, [one.reward for one in first.answers]) == (1, "4", [1.0, 0.0])
    assert [token.text for token in first.prompt.start] == ["<s>", "2+2", "=↵\n"]
    assert [token.control for token in first.prompt.start] == [True, False, False]
    assert [(token.text, token.learned) for token in first.answers[0].passage.start] == [("2", True), ("<end>", True)]
    assert (last.step, last.right, [one.reward for one in last.answers]) == (30, None, [1.0])


def test_a_run_with_one_recorded_step_shows_it_once():
    groups = [group(1, [0.0])]
    assert len(lesson_of(groups, groups).problems) == 1  # type: ignore[union-attr]


def test_of_a_supervised_run_the_first_rows_are_shown_whole():
    lesson = lesson_of([group(1, [0.0], version=-1)] * 6, [])
    assert lesson is not None
    assert (len(lesson.rows), lesson.problems) == (MOST_ROWS, [])
    assert [token.learned for token in lesson.rows[0].passage.start] == [False, False, False, True, True]


def test_of_several_sets_rows_of_each_are_shown():
    sets = ["a"] * 8 + ["b", "c", "d", "e"]
    lesson = lesson_of([group(1, [0.0], version=-1, environment=id) for id in sets], [])
    assert lesson is not None
    assert [row.set for row in lesson.rows] == ["a", "b", "c", "d", "e"]


def test_a_run_without_recorded_tokens_shows_nothing():
    assert lesson_of([], []) is None


def test_of_a_long_prompt_the_start_and_the_end_are_shown():
    long = passage(sequence([f"{at} " for at in range(2 * MOST_TOKENS)], ["x"]), answer=False)
    assert (long.size, long.left_out) == (2 * MOST_TOKENS, MOST_TOKENS)
    assert (long.start[0].text, long.end[-1].text) == ("0 ", f"{2 * MOST_TOKENS - 1} ")


def test_the_page_keeps_the_first_and_the_last_step_with_tokens_of_a_long_record():
    short = [group(step, [0.0, 1.0])._replace(answers=[]) for step in (2, 12)]
    collected = collect([group(1, [0.0]), group(1, [1.0]), short[0], group(10, [0.0]), group(11, [1.0]), short[1]])
    assert [one.step for one in collected.first] == [1, 1]
    assert [one.step for one in collected.last] == [11]
