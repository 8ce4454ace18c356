"""Records of the bank: bit-equal round trips, parts of answers, and identity."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from bank_helpers import lineage
from core_helpers import tiny_run
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.problem_digest import ProblemDigest
from megatron_rl.agent.reward_value import TurnScore
from megatron_rl.agent.trajectories import LARGEST_REWARD, Branch, Problem, Trajectory, TrajectoryGroup
from megatron_rl.generate.engine.interface import AnswerPrefix, Completion, GenerationRequest
from megatron_rl.generate.engine.transcript import Amount
from megatron_rl.learn.rollout.bank.bank_records import (
    fingerprint,
    group_record,
    join,
    part_record,
    prompt_checksum,
)
from megatron_rl.learn.rollout.bank.file import Record
from megatron_rl.learn.rollout.encoding import decode_group, encode_group
from megatron_rl.recipe.inference import Sampling

PROBLEM = Problem("1+1=", {"answer": 2})
PROBLEMS = {"sums": ProblemDigest(10, "a")}
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=8)
LOG_PROB = st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=0)


@st.composite
def sequences(draw: st.DrawFn) -> Branch:
    """Sequences of several turns, some of whose tokens are masked."""
    tokens = [7, *draw(TOKENS)]
    logprobs, versions, turns = [0.0] * len(tokens), [-1] * len(tokens), []
    for sampled, said in draw(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=3)):
        turns.append(range(len(tokens), len(tokens) + len(sampled)))
        tokens = [*tokens, *sampled, *said]
        logprobs += [draw(LOG_PROB) for _ in sampled] + [0.0] * len(said)
        versions += [draw(st.integers(0, 2**40)) for _ in sampled] + [-1] * len(said)
    choices = draw(st.lists(st.sampled_from([b"abcd", b"efgh", b""]), max_size=len(tokens)))
    masks = [version >= 0 and draw(st.booleans()) for version in versions]
    return Branch(tokens, masks, logprobs, versions, turns, choices=choices)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    parts = draw(st.lists(sequences(), min_size=1, max_size=3))
    numbers = draw(st.just([]) | st.permutations(range(sum(len(each.turns) for each in parts))))
    keys, agents = st.none() | st.text(), st.sampled_from(["", "solver"])
    return Trajectory.of_sequences(
        parts,
        text=draw(st.text(st.characters())),
        reward=draw(st.floats(-LARGEST_REWARD, LARGEST_REWARD)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        tool_calls=draw(st.none() | st.integers(0, 9)),
        components=draw(st.dictionaries(st.sampled_from(["format", "length"]), st.floats(-1, 1), max_size=2)),
        output=draw(st.text(st.characters(), max_size=9)),
    ).with_turn_scores(tuple(TurnScore(draw(st.floats(-1, 1)), draw(keys), draw(agents), each) for each in numbers))


@given(answers=st.lists(trajectories(), max_size=4), failures=st.dictionaries(st.text(), st.integers(1, 9), max_size=2))
def test_a_group_survives_a_round_trip(answers: list[Trajectory], failures: dict[str, int]) -> None:
    group = TrajectoryGroup(7, PROBLEM, answers, failures)
    assert decode_group(*group_record(group, 3, 4, lineage(1)), PROBLEM) == group


def test_choices_add_nothing_to_the_record_of_a_group_without_any() -> None:
    one = Trajectory.single([7, 8], Completion([1, 2], [0.0, -0.5], "stop", [0, 0]), "x", 0.5)
    head, body = encode_group(TrajectoryGroup(7, PROBLEM, [one], {}))
    with_choices, longer = encode_group(TrajectoryGroup(7, PROBLEM, [replace(one, choices=[b"ab", b"", b"cd"])], {}))
    assert with_choices == head | {"choices": [(0, 3, [1], 4)]}
    assert longer.replace(b"abcd", b"") == body


def test_answers_share_the_choices_of_their_prompt() -> None:
    prompt, width = [b"%04d" % at for at in range(100)], 4
    one = Trajectory.single([7] * 100, Completion([1, 2], [0.0, 0.0], "stop", [0, 0]), "", 0.0)
    answers = [replace(one, choices=[*prompt, b"%04d" % (900 + at)]) for at in range(8)]
    _, body = encode_group(TrajectoryGroup(7, PROBLEM, answers, {}))
    _, plain = encode_group(TrajectoryGroup(7, PROBLEM, [one] * 8, {}))
    assert len(body) - len(plain) == (100 + 8) * width


# Answers in parts


def whole_answer(length: int, shift: int = 0) -> AnswerPrefix:
    """An answer to a prompt of two tokens."""
    tokens = [shift + i for i in range(length)]
    choices = [b"" if at % 5 == 3 else b"%02d%02d" % (at, shift) for at in range(length + 1)]
    return AnswerPrefix(tokens, [-float(i) for i in range(length)], [shift] * length, choices if length else [])


def part(start: int, end: int, attempt: int = 1, shift: int = 0) -> Record:
    return part_record(
        5,
        0,
        shift,
        (11, 22, 3),
        Amount(start, start + 1 if start else 0),
        whole_answer(end, shift),
        lineage(attempt),
    )


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_parts_of_any_length_make_the_answer(cuts: list[int]) -> None:
    edges = sorted({0, 30, *cuts})
    assert join(part(start, end) for start, end in pairwise(edges)) == whole_answer(30)


def test_parts_after_a_gap_are_ignored() -> None:
    assert join([part(0, 10), part(20, 30)]) == whole_answer(10)
    assert join([part(0, 10), (part(10, 20)[0], None), part(20, 30)]) == whole_answer(10)
    assert join([(part(0, 10)[0], None), part(10, 20)]) is None
    assert join([]) is None


def test_a_later_attempt_that_resumed_from_fewer_tokens_wins() -> None:
    joined = join([part(0, 10), part(10, 20), part(10, 12, attempt=2, shift=100)])
    assert joined is not None
    assert joined.tokens == [*range(10), 110, 111]
    assert joined.versions == [*[0] * 10, 100, 100]
    restarted = join([part(0, 10), part(0, 4, attempt=2, shift=100)])
    assert restarted == whole_answer(4, shift=100)


def test_a_file_that_was_copied_but_not_deleted_changes_nothing() -> None:
    parts = [part(0, 10), part(10, 20)]
    assert join([*parts, *parts]) == whole_answer(20)


def test_another_prompt_is_another_answer() -> None:
    one, other = (GenerationRequest(prompt, 1, Sampling(max_new_tokens=3), 0) for prompt in ([1, 2], [1, 3]))
    assert prompt_checksum(one) != prompt_checksum(other)


@pytest.mark.parametrize(
    ("changed", "matters"),
    [
        ({"sampling": {"temperature": 0.5}}, True),
        ({"environment": {"args": {"evaluation_problems": 9}}}, True),
        ({"grpo": {"group_size": 2}}, True),
        ({"training": {"seed": 4}}, True),
        ({"tokenizer": {"alphabet": "=0123456789+-"}}, True),
        ({"training": {"steps": 99}}, False),
        ({"optimizer": {"learning_rate": 0.5}}, False),
    ],
)
def test_a_change_of_the_recipe_matters_if_answers_depend_on_it(changed: dict[str, Any], matters: bool) -> None:
    assert (fingerprint(tiny_run(**changed), PROBLEMS) != fingerprint(tiny_run(), PROBLEMS)) == matters


def test_a_change_of_the_problems_matters() -> None:
    other = {"sums": ProblemDigest(10, "b")}
    assert fingerprint(tiny_run(), other) != fingerprint(tiny_run(), PROBLEMS)
