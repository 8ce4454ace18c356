"""What the bank remembers comes back bit for bit, and only what belongs to this line of training is used."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest
import torch
from bank_helpers import entry, line
from core_helpers import tiny_run, trajectory
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.inference.api import Beginning, GenerationRequest
from megatron_rl.inference.config import Sampling
from megatron_rl.rollout.bank.file import Entry, Record
from megatron_rl.rollout.bank.records import (
    Lineage,
    answer_of,
    attempt_record,
    fingerprint,
    group_record,
    join,
    live,
    prompt_checksum,
    read_group,
    shrink,
    stretch_record,
    usable,
    whole_share,
)

PROBLEM = Problem("1+1=", {"answer": 2})
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=8)
LOG_PROB = st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=0)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Of any number of turns, some of whose tokens may not be trained on."""
    tokens = [7, *draw(TOKENS)]
    logprobs, versions, turns = [0.0] * len(tokens), [-1] * len(tokens), []
    for sampled, said in draw(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=3)):
        turns.append(range(len(tokens), len(tokens) + len(sampled)))
        tokens = [*tokens, *sampled, *said]
        logprobs += [draw(LOG_PROB) for _ in sampled] + [0.0] * len(said)
        versions += [draw(st.integers(0, 2**40)) for _ in sampled] + [-1] * len(said)
    return Trajectory(
        tokens=tokens,
        loss_mask=[version >= 0 and draw(st.booleans()) for version in versions],
        logprobs=logprobs,
        versions=versions,
        turns=turns,
        text=draw(st.text(st.characters())),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
    )


@given(answers=st.lists(trajectories(), max_size=4), failures=st.dictionaries(st.text(), st.integers(1, 9), max_size=2))
def test_a_group_comes_back_as_it_was(answers: list[Trajectory], failures: dict[str, int]) -> None:
    group = TrajectoryGroup(7, PROBLEM, answers, failures)
    assert read_group(*group_record(group, 3, 4, line(1)), PROBLEM) == group


def test_logprobs_of_the_engine_keep_every_bit() -> None:
    logprobs = torch.log_softmax(torch.randn(1000, generator=torch.Generator().manual_seed(0)), 0).tolist()
    group = TrajectoryGroup(0, PROBLEM, [trajectory([1], list(range(1000)), logprobs=logprobs)], {})
    assert read_group(*group_record(group, 0, 0, line(1)), PROBLEM).trajectories[0].logprobs == [0.0, *logprobs]


# Answers in stretches


def whole_answer(length: int, shift: int = 0) -> Beginning:
    return Beginning([shift + i for i in range(length)], [-float(i) for i in range(length)], shift)


def stretch(start: int, end: int, attempt: int = 1, shift: int = 0) -> Record:
    return stretch_record(5, 0, shift, (11, 22, 3), start, whole_answer(end, shift), line(attempt))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_stretches_make_the_answer_whatever_their_lengths(cuts: list[int]) -> None:
    edges = sorted({0, 30, *cuts})
    assert join(stretch(start, end) for start, end in pairwise(edges)) == whole_answer(30)


def test_a_record_says_whose_tokens_they_are_and_where_from() -> None:
    head, _ = stretch(4, 9, attempt=6)
    assert (head["ordinal"], head["start"], head["count"]) == (5, 4, 5)
    assert answer_of(head) == (11, 22, 3)
    assert head["line"] == asdict(line(6))


def test_what_follows_a_hole_is_not_used() -> None:
    assert join([stretch(0, 10), stretch(20, 30)]) == whole_answer(10)
    assert join([stretch(0, 10), (stretch(10, 20)[0], None), stretch(20, 30)]) == whole_answer(10)
    assert join([(stretch(0, 10)[0], None), stretch(10, 20)]) is None
    assert join([]) is None


def test_a_later_attempt_that_went_on_from_less_has_the_last_word() -> None:
    """Its tokens may differ from those the earlier one had there."""
    joined = join([stretch(0, 10), stretch(10, 20), stretch(10, 12, attempt=2, shift=100)])
    assert joined is not None
    assert joined.tokens == [*range(10), 110, 111]
    assert joined.policy_version == 0
    afresh = join([stretch(0, 10), stretch(0, 4, attempt=2, shift=100)])
    assert afresh == whole_answer(4, shift=100)


def test_a_file_that_was_folded_but_not_deleted_changes_nothing() -> None:
    stretches = [stretch(0, 10), stretch(10, 20)]
    assert join([*stretches, *stretches]) == whole_answer(20)


def test_another_prompt_is_another_answer() -> None:
    one, other = (GenerationRequest(prompt, 1, Sampling(max_new_tokens=3), 0) for prompt in ([1, 2], [1, 3]))
    assert prompt_checksum(one) != prompt_checksum(other)


# Which records are used


def group_entry(attempt: int, restored: int, newest: int, ordinal: int = 50, recipe: str = "r") -> Entry:
    group = TrajectoryGroup(ordinal, PROBLEM, [], {})
    return entry(group_record(group, newest, newest, line(attempt, restored, recipe))[0])


def stretch_entry(attempt: int, restored: int, newest: int, ordinal: int = 50, sample: int = 0, size: int = 9) -> Entry:
    answer = whole_answer(3)
    return entry(stretch_record(ordinal, newest, newest, (1, 2, sample), 0, answer, line(attempt, restored))[0], size)


def test_work_of_the_restored_weights_and_older_is_used() -> None:
    entries = [group_entry(1, 0, newest) for newest in (38, 39, 40, 41)]
    found = usable(entries, line(2, 40), 0)
    assert found.entries == entries[:3]
    assert found.discarded == {"newer than the checkpoint": 1}


def test_a_line_given_up_stays_given_up() -> None:
    """Attempt 1 came to version 47 and 2 went on from 40: when that has come to 45, what 1 sampled at 45 is not it."""
    stale, current = group_entry(1, 0, 45), group_entry(2, 40, 45)
    assert usable([stale, current], line(3, 45), 0).entries == [current]
    assert usable([group_entry(1, 0, 40), current], line(3, 45), 0).entries[0].head["newest"] == 40


def test_an_attempt_that_left_only_its_beginning_cuts_the_line_too() -> None:
    """All it generated may be settled and forgotten."""
    begun = entry(attempt_record(line(2, 40))[0])
    assert usable([group_entry(1, 0, 45), begun], line(3, 45), 0).entries == []


@given(
    versions=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=6),
    restored=st.integers(0, 8),
)
def test_a_record_is_used_exactly_where_no_later_checkpoint_is_older(
    versions: list[tuple[int, int]], restored: int
) -> None:
    """Attempt i went on from a checkpoint, trained some steps and sampled with each version on its way."""
    entries, starts = [], []
    for attempt, (start, steps) in enumerate(versions, start=1):
        starts.append(start)
        entries += [
            group_entry(attempt, start, version, ordinal=version) for version in range(start, start + steps + 1)
        ]
    now = line(len(versions) + 1, restored)
    for each in entries:
        attempt = each.head["line"]["attempt"]
        on_line = all(each.head["newest"] <= later for later in [*starts[attempt:], restored])
        assert (each in usable(entries, now, 0).entries) == on_line


def test_newer_groups_may_be_used_off_policy_but_not_parts_of_answers() -> None:
    newer, part = group_entry(1, 0, 43), stretch_entry(1, 0, 43)
    found = usable([newer, part], line(2, 40), 0, newer="reuse")
    assert found.entries == [newer]
    assert found.discarded == {"newer than the checkpoint": 1}


def test_a_group_on_the_line_takes_precedence_over_a_newer_one() -> None:
    newer, on_line = group_entry(1, 0, 43), group_entry(1, 0, 40)
    assert usable([on_line, newer], line(2, 40), 0, newer="reuse").entries == [newer, on_line]


def test_settled_ordinals_are_not_generated_work_any_more() -> None:
    entries = [group_entry(1, 0, 0, ordinal) for ordinal in (3, 4, 5)]
    assert usable(entries, line(2, 0), settled_below=4).entries == entries[1:]


def test_answers_to_other_questions_are_put_aside() -> None:
    found = usable([group_entry(1, 0, 0, recipe="other")], line(2, 0), 0)
    assert found.entries == []
    assert found.discarded == {"of another recipe": 1}


@pytest.mark.parametrize(
    ("changed", "matters"),
    [
        ({"sampling": {"temperature": 0.5}}, True),
        ({"environment": {"args": {"evaluation_problems": 9}}}, True),
        ({"grpo": {"group_size": 2}}, True),
        ({"training": {"seed": 4}}, True),
        ({"training": {"steps": 99}}, False),
        ({"optimizer": {"learning_rate": 0.5}}, False),
        ({"job": {"gpus_per_node": 2}}, False),
    ],
)
def test_a_change_of_the_recipe_matters_where_answers_depend_on_it(changed: dict[str, Any], matters: bool) -> None:
    assert (fingerprint(tiny_run(**changed)) != fingerprint(tiny_run())) == matters


@given(known=st.sets(st.integers(0, 9)), share=st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_a_share_is_known_whole_or_not_at_all(known: set[int], share: tuple[int, int]) -> None:
    ordinals = range(share[0], sum(share))
    groups = {ordinal: TrajectoryGroup(ordinal, PROBLEM, [], {}) for ordinal in known & set(ordinals)}
    assert whole_share(ordinals, groups) == (groups if set(ordinals) <= known else {})


# What stays in a file


def test_a_checkpoint_settles_and_a_score_supersedes() -> None:
    begun = [entry(attempt_record(line(attempt))[0]) for attempt in (1, 2, 2)]
    groups = [group_entry(1, 0, 0, ordinal) for ordinal in (3, 4, 5)]
    parts = [stretch_entry(1, 0, 0, ordinal) for ordinal in (3, 4, 5, 6)]
    assert live([*begun, *parts, *groups], settled_below=4) == [*begun[:2], parts[3], *groups[1:]]


def test_where_room_is_short_the_oldest_answers_under_way_go_and_finished_work_stays() -> None:
    group = group_entry(1, 0, 0)
    parts = [stretch_entry(1, 0, 0, 60, sample, size=100) for sample in (0, 1, 2, 0, 1, 2)]
    assert shrink([group, *parts], room=700) == [group, *parts]
    assert shrink([group, *parts], room=690) == [group, *(parts[i] for i in (1, 2, 4, 5))]
    assert shrink([group, *parts], room=0) == [group]


@given(sizes=st.lists(st.integers(1, 50), max_size=12), room=st.integers(0, 400))
def test_shrinking_leaves_whole_answers_that_fit(sizes: list[int], room: int) -> None:
    parts = [stretch_entry(1, 0, 0, 60, sample=i % 4, size=size) for i, size in enumerate(sizes)]
    kept = shrink(parts, room)
    assert sum(each.body_bytes for each in kept) <= room
    answers = {answer_of(each.head) for each in kept}
    assert kept == [each for each in parts if answer_of(each.head) in answers]


def test_a_lineage_names_the_run_and_its_checkpoint() -> None:
    head, _ = attempt_record(Lineage("demo-3", 4, 20, 40, "f"))
    expected = {"run": "demo-3", "attempt": 4, "step": 20, "policy_version": 40, "recipe": "f"}
    assert head == {"kind": "attempt", "line": expected}
