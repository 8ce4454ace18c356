"""Rollouts of a page: bounded, whatever the size of the record."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.report.page_rollouts import RolloutCollector, Rollouts, thinned
from megatron_rl.contract.rollout_records import AnswerLine, GroupLine, SequenceLine


def group(step: int, ordinal: int = 0, rewards: tuple[float, ...] = (0.0, 1.0), tokens: int = 0, **facts) -> GroupLine:
    count = len(rewards)
    line = SequenceLine(
        [1] * tokens, ["a"] * tokens, [[0, tokens]], [True] * tokens, *[[0.0] * tokens] * 2, [1] * tokens
    )
    answers = [AnswerLine("a" * tokens, [line]) for _ in rewards] if tokens else []
    made = GroupLine(step, ordinal, "p", "1+1=", list(rewards), [0.0] * count, [3] * count, ["stop"] * count, 0, 1)
    return made._replace(answers=answers, **facts)


def collected(*groups: GroupLine, most_answers: int = 1000, most_tokens: int = 1000) -> Rollouts:
    collector = RolloutCollector(most_answers, most_tokens)
    for one in groups:
        collector.add(one)
    return collector.rollouts()


def test_each_group_is_a_row_and_texts_are_stored_once():
    lost = group(2, 5, (1.0,), problem="q", prompt="2+2=", failures={"timeout": 2, "tool": 1}, passed_over="no signal")
    found = collected(group(1, 0, tokens=2), lost)
    assert (found.steps, found.ordinals, found.rewards) == ([1, 2], [0, 5], [[0.0, 1.0], [1.0]])
    assert [found.problems[at] for at in found.problem] == [["p", "1+1="], ["q", "2+2="]]
    assert [found.names[at] for at in found.passed_over] == ["", "no signal"]
    assert [[found.names[at] for at in row] for row in found.reasons] == [["stop", "stop"], ["stop"]]
    assert (found.lost, found.sample) == ([0, 3], [0, -1])
    assert found.samples[0].answers[0].sequences[0].parts[0].pieces == ["a", "a"]


def test_problems_that_never_had_signal_come_first_the_most_frequent_before_the_others():
    groups = [
        group(1, 0, (0.0, 1.0), problem="learnt"),
        group(1, 1, (0.0, 0.0), problem="hard"),
        group(2, 2, (1.0, 1.0), problem="learnt"),
        group(2, 3, (0.0, 0.0), problem="hard"),
        group(2, 4, (1.0, 1.0), problem="easy"),
        group(3, 5, (), problem="easy"),
    ]
    found = collected(*groups)
    rows = {found.problems[row.problem][0]: (row.groups, row.with_signal, row.first, row.last) for row in found.history}
    assert rows == {"hard": (2, 0, 0.0, 0.0), "easy": (2, 0, 1.0, 1.0), "learnt": (2, 1, 0.5, 1.0)}
    assert list(rows)[-1] == "learnt"


def test_a_long_record_keeps_its_newest_and_some_older_groups_and_counts_all():
    found = collected(*(group(step, tokens=1 + step % 3) for step in range(1, 501)), most_answers=100, most_tokens=50)
    assert sum(map(len, found.rewards)) <= 100 + 50  # those with tokens are rows as well
    assert found.steps[-20:] == list(range(481, 501))
    assert found.steps[0] < 250
    assert (found.all_groups, found.all_sampled, found.history[0].groups) == (500, 500, 500)
    tokens = [part.size for one in found.samples for a in one.answers for s in a.sequences for part in s.parts]
    assert sum(tokens) <= 50


@given(st.lists(st.integers(0, 20), max_size=60), st.integers(1, 100))
def test_what_is_kept_fits_and_has_the_newest(sizes, most):
    kept = thinned(sizes, most)
    assert kept == sorted(set(kept))
    assert sum(sizes[place] for place in kept) <= max(most, sizes[-1] if sizes else 0)
    if sizes:
        assert kept[-1] == len(sizes) - 1
    if sum(sizes) <= most:
        assert kept == list(range(len(sizes)))
