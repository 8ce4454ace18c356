"""Selection of records: those on this line of training are reused, and those that may still be needed are kept."""

from __future__ import annotations

from bank_helpers import entry, lineage
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.generate.engine.interface import AnswerPrefix
from megatron_rl.generate.engine.transcript import Amount
from megatron_rl.learn.rollout.bank.bank_records import (
    answer_key,
    attempt_record,
    group_record,
    part_record,
    records_within,
    reusable_records,
    unsettled_records,
    whole_share,
)
from megatron_rl.learn.rollout.bank.file import Entry

PROBLEM = Problem("1+1=", {"answer": 2})

# Records that are reused


def group_entry(attempt: int, restored: int, newest: int, ordinal: int = 50, recipe: str = "r") -> Entry:
    group = TrajectoryGroup(ordinal, PROBLEM, [], {})
    return entry(group_record(group, newest, newest, lineage(attempt, restored, recipe))[0])


def part_entry(attempt: int, restored: int, newest: int, ordinal: int = 50, sample: int = 0, size: int = 9) -> Entry:
    answer = AnswerPrefix([1, 2, 3], [-1.0] * 3, [newest] * 3)
    return entry(
        part_record(ordinal, newest, newest, (1, 2, sample), Amount(0), answer, lineage(attempt, restored))[0], size
    )


def test_an_attempt_that_left_only_its_own_record_cuts_the_line_too() -> None:
    """All its groups may be settled and forgotten."""
    begun = entry(attempt_record(lineage(2, 40))[0])
    assert reusable_records([group_entry(1, 0, 45), begun], lineage(3, 45), 0).entries == []


@given(
    versions=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=6),
    restored=st.integers(0, 8),
)
def test_a_record_is_reused_exactly_if_no_later_attempt_resumed_from_an_older_version(
    versions: list[tuple[int, int]], restored: int
) -> None:
    """versions: for each attempt, the version it resumed from and the number of steps it trained."""
    entries, starts = [], []
    for attempt, (start, steps) in enumerate(versions, start=1):
        starts.append(start)
        entries += [
            group_entry(attempt, start, version, ordinal=version) for version in range(start, start + steps + 1)
        ]
    now = lineage(len(versions) + 1, restored)
    for each in entries:
        attempt = each.head["lineage"]["attempt"]
        on_line = all(each.head["newest"] <= later for later in [*starts[attempt:], restored])
        assert (each in reusable_records(entries, now, 0).entries) == on_line


def test_newer_groups_may_be_reused_off_policy_but_not_parts_of_answers() -> None:
    newer, part = group_entry(1, 0, 43), part_entry(1, 0, 43)
    found = reusable_records([newer, part], lineage(2, 40), 0, newer="reuse")
    assert found.entries == [newer]
    assert found.discarded == {"newer than the checkpoint": 1}


def test_a_group_on_the_line_takes_precedence_over_a_newer_one() -> None:
    newer, on_line = group_entry(1, 0, 43), group_entry(1, 0, 40)
    assert reusable_records([on_line, newer], lineage(2, 40), 0, newer="reuse").entries == [newer, on_line]


def test_settled_ordinals_are_not_reused() -> None:
    entries = [group_entry(1, 0, 0, ordinal) for ordinal in (3, 4, 5)]
    assert reusable_records(entries, lineage(2, 0), settled_below=4).entries == entries[1:]


def test_records_of_another_recipe_are_ignored() -> None:
    found = reusable_records([group_entry(1, 0, 0, recipe="other")], lineage(2, 0), 0)
    assert found.entries == []
    assert found.discarded == {"of another recipe": 1}


@given(known=st.sets(st.integers(0, 9)), share=st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_a_share_is_reused_whole_or_not_at_all(known: set[int], share: tuple[int, int]) -> None:
    ordinals = range(share[0], sum(share))
    groups = {ordinal: TrajectoryGroup(ordinal, PROBLEM, [], {}) for ordinal in known & set(ordinals)}
    assert whole_share(ordinals, groups) == (groups if set(ordinals) <= known else {})


# Records that stay in a file


def test_settled_records_and_parts_of_scored_groups_go() -> None:
    begun = [entry(attempt_record(lineage(attempt))[0]) for attempt in (1, 2, 2)]
    groups = [group_entry(1, 0, 0, ordinal) for ordinal in (3, 4, 5)]
    parts = [part_entry(1, 0, 0, ordinal) for ordinal in (3, 4, 5, 6)]
    assert unsettled_records([*begun, *parts, *groups], settled_below=4) == [*begun[:2], parts[3], *groups[1:]]


def test_short_of_room_the_oldest_unfinished_answers_go_and_finished_work_stays() -> None:
    group = group_entry(1, 0, 0)
    parts = [part_entry(1, 0, 0, 60, sample, size=100) for sample in (0, 1, 2, 0, 1, 2)]
    assert records_within([group, *parts], limit=700) == [group, *parts]
    assert records_within([group, *parts], limit=690) == [group, *(parts[i] for i in (1, 2, 4, 5))]
    assert records_within([group, *parts], limit=0) == [group]


@given(sizes=st.lists(st.integers(1, 50), max_size=12), limit=st.integers(0, 400))
def test_the_answers_kept_are_whole_and_fit(sizes: list[int], limit: int) -> None:
    parts = [part_entry(1, 0, 0, 60, sample=i % 4, size=size) for i, size in enumerate(sizes)]
    kept = records_within(parts, limit)
    assert sum(each.body_bytes for each in kept) <= limit
    answers = {answer_key(each.head) for each in kept}
    assert kept == [each for each in parts if answer_key(each.head) in answers]
