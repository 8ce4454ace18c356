"""Tokens of an answer in parts: prompt, messages of others, reasoning, answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.report.tokens import ANSWER, LEFT_OUT, MOST_TOKENS, SequencePart, parts, shown_sequence
from megatron_rl.contract.rollout_records import NOT_FINITE, SequenceLine


def named(pieces: list[str], *turns: list[int]) -> list[tuple[str, str]]:
    return [(part.kind, "".join(pieces[part.start : part.end])) for part in parts(pieces, turns)]


def sequence(pieces: list[str], turns: list[list[int]], **columns: list) -> SequenceLine:
    inside = [any(start <= at < end for start, end in turns) for at in range(len(pieces))]
    whole = {
        "tokens": list(range(len(pieces))),
        "trained": inside,
        "logprobs": [-0.5 if one else 0.0 for one in inside],
        "trained_logprobs": [-0.25 if one else 0.0 for one in inside],
        "versions": [3 if one else -1 for one in inside],
    }
    return SequenceLine(pieces=pieces, turns=turns, **{**whole, **columns})


def test_a_conversation_with_a_tool_has_prompt_call_result_and_answer():
    pieces = ["2+2", "<user>", "call", "<end>", "4", "<tool>", "It is", " 4"]
    assert named(pieces, [2, 4], [6, 8]) == [
        ("prompt", "2+2<user>"),
        ("answer", "call<end>"),
        ("message", "4<tool>"),
        ("answer", "It is 4"),
    ]


def test_reasoning_is_a_part_with_its_tags_whatever_tokens_these_are_made_of():
    pieces = ["?", "<th", "ink>", "a", "b</", "think>", "4"]
    assert named(pieces, [1, 7]) == [("prompt", "?"), ("reasoning", "<think>ab</think>"), ("answer", "4")]


def test_reasoning_that_the_prompt_opened_or_that_never_ends_is_reasoning_too():
    assert named(["<think>", "a", "</think>", "4"], [1, 4])[1:] == [("reasoning", "a</think>"), ("answer", "4")]
    assert named(["?", "so ", "<think>", "a"], [1, 4])[1:] == [("answer", "so "), ("reasoning", "<think>a")]


@given(st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "a", "</", ""]), max_size=12), st.data())
def test_every_token_is_in_one_part(pieces, data):
    borders = sorted(data.draw(st.sets(st.integers(0, len(pieces)), max_size=4)))
    turns = [[low, high] for low, high in zip(borders[::2], borders[1::2], strict=False)]
    found = parts(pieces, turns)
    places = [at for part in found for at in range(part.start, part.end)]
    assert places == list(range(len(pieces)))
    assert all(part.end > part.start for part in found)


def test_tokens_keep_their_numbers_in_runs():
    (prompt, answer) = shown_sequence(sequence(["?", "a", "b"], [[1, 3]])).parts
    assert (prompt.logprobs, prompt.differences, prompt.versions, prompt.trained) == ([], [], [[-1, 1]], [[0, 1]])
    assert (answer.logprobs, answer.differences) == ([-0.5, -0.5], [0.25, 0.25])
    assert (answer.versions, answer.trained, answer.tokens) == ([[3, 2]], [[1, 2]], [1, 2])


def test_log_probs_that_are_not_finite_have_no_number():
    line = sequence(["a", "b"], [[0, 2]], logprobs=[NOT_FINITE, -1.0], trained_logprobs=[-1.0, NOT_FINITE])
    (answer,) = shown_sequence(line).parts
    assert answer.logprobs == [None, -1.0]
    assert answer.differences == [None, None]


def test_the_middle_of_a_long_part_is_left_out_and_counted():
    head, gap, tail = shown_sequence(sequence(["a"] * (MOST_TOKENS + 7), [[0, MOST_TOKENS + 7]])).parts
    assert (head.kind, gap.kind, gap.size) == (ANSWER, LEFT_OUT, 7)
    assert head.size == tail.size == MOST_TOKENS // 2
    assert parts(["a"], [[0, 1]]) == [SequencePart(ANSWER, 0, 1)]
