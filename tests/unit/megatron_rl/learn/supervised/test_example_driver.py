"""The batches of a supervised run: every row once in a pass, on one replica, whatever the layout."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from core_helpers import ALPHABET
from hypothesis import given, settings
from hypothesis import strategies as st
from supervised_helpers import sums, supervised_run

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.trajectories import Problem
from megatron_rl.learn.supervised.example_driver import ExampleDriver
from megatron_rl.learn.supervised.row_mix import RowMix
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.recipe.tokenizer_section import TokenizerConfig

CHARACTERS = build_tokenizer(TokenizerConfig(type="characters", alphabet=ALPHABET))


def rows(count: int) -> list[Problem]:
    values = [{"prompt": row["question"], "answer": row["answer"]} for row in sums(count)]
    return [Problem(f"{number} {each}", each) for number, each in enumerate(values)]


def driver(problems: list[Problem], replica: int = 0, replicas: int = 1, wanted: int = 6) -> ExampleDriver:
    data = SimpleNamespace(rank=lambda: replica, size=lambda: replicas)
    groups: Any = SimpleNamespace(data=data, reports=True)
    config = supervised_run(data={"path": "/x", "examples_per_step": wanted})
    mix = RowMix([TrainingSet("", 1.0, problems)], config.training.seed)
    return ExampleDriver(mix, CHARACTERS, config, groups, None, None)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(4, 9))
def test_a_pass_trains_on_every_row_once_in_any_layout(count: int, replicas: int, wanted: int) -> None:
    problems = rows(count)
    drivers = [driver(problems, replica, replicas, wanted) for replica in range(replicas)]
    seen: list[str] = []
    for step in range(3):
        batches = [each.collect(step * wanted) for each in drivers]
        assert sorted(chain.from_iterable(batch.positions for batch in batches)) == list(range(wanted))
        assert {batch.next_ordinal for batch in batches} == {(step + 1) * wanted}
        of_ordinal = {group.ordinal: group.problem.prompt for batch in batches for group in batch.groups}
        seen += [of_ordinal[ordinal] for ordinal in sorted(of_ordinal)]
    passes = [seen[start : start + count] for start in range(0, len(seen), count)]
    for each in passes:
        assert len({*each}) == len(each)
    assert seen == [each.problem.prompt for each in driver(problems, wanted=3 * wanted).collect(0).groups]


def test_the_work_of_the_replicas_is_balanced() -> None:
    long = [Problem("x" * 4000, {"prompt": "1" * 20, "answer": "2"})] * 2
    short = [Problem("x" * 40, {"prompt": "1", "answer": "2"})] * 6
    counts = [len(driver(long + short, replica, 2, wanted=8).collect(0).groups) for replica in range(2)]
    assert sum(counts) == 8
    heavy = [
        sum(len(group.problem.prompt) > 100 for group in driver(long + short, replica, 2, wanted=8).collect(0).groups)
        for replica in range(2)
    ]
    assert heavy == [1, 1]


def test_a_row_that_is_too_long_is_dropped_with_its_reason_and_not_replaced() -> None:
    problems = [*rows(5), Problem("long", {"prompt": "1" * 60, "answer": "2"})]
    batch = driver(problems).collect(0)
    assert len(batch.groups) == 5
    assert [*batch.dropped.values()] == ["it is longer than training.sequence_length"]


def test_dropped_rows_are_warned_of_by_reason_at_growing_counts(caplog: pytest.LogCaptureFixture) -> None:
    long = [Problem("long", {"prompt": "1" * 60, "answer": "2", "where": "rows.jsonl:7"})] * 12
    each = driver([*rows(16), *long], wanted=7)
    for step in range(4):
        each.collect(7 * step)
    first, tenth = caplog.messages
    assert first.startswith("rows.jsonl:7 is dropped: it is longer than training.sequence_length (rows dropped")
    assert tenth.endswith("so far: 10)")


def test_a_trajectory_marks_the_learned_tokens_as_turns() -> None:
    (group,) = driver([Problem("", {"prompt": "1+1=", "answer": "2"})] * 6).collect(0).groups[:1]
    (answer,) = group.trajectories
    assert (answer.turns, answer.prompt_length, answer.answer_length) == ([range(4, 6)], 4, 2)
    assert answer.text == "1+1=2<end>"
