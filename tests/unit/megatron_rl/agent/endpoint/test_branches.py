"""Branches of a rollout: whatever was asked, in whatever order, each sampled token is trained exactly once."""

from __future__ import annotations

from collections import Counter

from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_rl.agent.endpoint.branches import AnswerTree
from megatron_rl.agent.trajectories import Branch
from megatron_rl.generate.engine.interface import Completion


def answer(*tokens: int) -> Completion:
    return Completion([*tokens], [-float(token) for token in tokens], "stop", [3] * len(tokens))


def sequences(branches: AnswerTree) -> list[Branch]:
    return [each.branch for each in branches.sequences()]


def trained(branch: Branch) -> list[int]:
    return [token for token, own in zip(branch.tokens, branch.loss_mask, strict=True) if own]


def test_conversation_that_only_grows_is_one_sequence() -> None:
    branches = AnswerTree()
    branches.add([1, 2], [answer(10, 11)])
    branches.add([1, 2, 10, 11, 5], [answer(12)])
    (only,) = sequences(branches)
    assert only == Branch(
        tokens=[1, 2, 10, 11, 5, 12],
        loss_mask=[False, False, True, True, False, True],
        logprobs=[0.0, 0.0, -10.0, -11.0, 0.0, -12.0],
        versions=[-1, -1, 3, 3, -1, 3],
        turns=[range(2, 4), range(5, 6)],
    )


def test_fork_in_the_middle_has_the_beginning_as_context() -> None:
    branches = AnswerTree()
    branches.add([1], [answer(10)])
    branches.add([1, 10, 2], [answer(11, 12)])
    branches.add([1, 10, 3], [answer(13)])
    first, second = sequences(branches)
    assert (first.tokens, trained(first)) == ([1, 10, 2, 11, 12], [10, 11, 12])
    assert (second.tokens, trained(second), second.turns) == ([1, 10, 3, 13], [13], [range(3, 4)])


def test_several_answers_to_one_prompt_are_several_sequences() -> None:
    branches = AnswerTree()
    branches.add([1], [answer(10), answer(11)])
    branches.add([1, 11, 2], [answer(12)])
    assert [(one.tokens, trained(one)) for one in sequences(branches)] == [([1, 11, 2, 12], [11, 12]), ([1, 10], [10])]
    assert branches.tokens == 1 + 1 + 1 + 1 + 2  # answers to one prompt count it each


def test_of_equal_answers_each_is_continued_once() -> None:
    branches = AnswerTree()
    branches.add([1], [answer(10), answer(10)])
    branches.add([1, 10, 2], [answer(11)])
    branches.add([1, 10, 3], [answer(12)])
    assert [trained(one) for one in sequences(branches)] == [[10, 11], [10, 12]]


Call = tuple[list[int], int, list[int]]
"""Prompt, which known answer it continues (counted from the last; 0: none), and the answer."""

made_up = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=2),
    st.integers(0, 4),
    st.lists(st.integers(2, 3), min_size=1, max_size=2),
)
calls = st.lists(made_up, min_size=1, max_size=10)


def played(calls: list[Call]) -> tuple[AnswerTree, list[list[int]], list[tuple[list[int], list[int]]]]:
    """Return the branches of these calls, the sequences that were sampled, and the calls as (prompt, answer)."""
    branches, whole, made = AnswerTree(), list[list[int]](), list[tuple[list[int], list[int]]]()
    for context, continued, tokens in calls:
        prompt = (whole[-continued] if 0 < continued <= len(whole) else []) + context
        branches.add(prompt, [answer(*tokens)])
        whole.append(prompt + tokens)
        made.append((prompt, tokens))
    return branches, whole, made


@given(calls)
def test_every_sampled_token_is_trained_exactly_once_and_sequences_consist_of_prompts_and_answers(
    calls: list[Call],
) -> None:
    branches, whole, made = played(calls)
    found = sequences(branches)
    assert Counter(token for one in found for token in trained(one)) == Counter(
        token for _, tokens in made for token in tokens
    )
    turns = Counter(tuple(one.tokens[turn.start : turn.stop]) for one in found for turn in one.turns)
    assert turns == Counter(tuple(tokens) for _, tokens in made)
    for one in found:
        assert one.tokens in whole
        for turn in one.turns:
            assert (one.tokens[: turn.start], one.tokens[turn.start : turn.stop]) in made


@given(calls, st.data())
def test_order_of_parallel_calls_does_not_matter(calls: list[Call], data: st.DataObject) -> None:
    """Any order in which each answer is known before a call continues it. Of equal answers, the order decides which one
    a call continues."""
    branches, whole, made = played(calls)
    assume(len({*map(tuple, whole)}) == len(whole))
    rest, shuffled = list(made), AnswerTree()
    known: list[list[int]] = []
    while rest:
        ready = [
            (prompt, tokens)
            for prompt, tokens in rest
            if all(other + its in known for other, its in made if (other + its) == prompt[: len(other + its)])
        ]
        prompt, tokens = data.draw(st.sampled_from(ready))
        rest.remove((prompt, tokens))
        known.append(prompt + tokens)
        shuffled.add(prompt, [answer(*tokens)])
    assert sequences(shuffled) == sequences(branches)
