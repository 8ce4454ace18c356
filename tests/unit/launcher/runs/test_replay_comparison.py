"""Comparison of recorded and new answers by `mrl replay`, and its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_helpers import make_run

from launcher.cli.show.replay_lines import replay_lines
from launcher.errors import BadInput
from launcher.runs.replay import Replayed, changed_scores, replay
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append
from megatron_rl.contract.rollout_records import AnswerLine, GroupLine, SequenceLine, group_json, member, rollouts_file


def answer(text: str, logprob: float = -1.0, components: dict[str, float] | None = None) -> AnswerLine:
    tokens = [1, 2, *map(ord, text)]
    drawn = len(tokens) - 2
    sequence = SequenceLine(
        tokens,
        [*"1+", *text],
        [[2, len(tokens)]],
        [False, False, *[True] * drawn],
        [0.0, 0.0, *[logprob] * drawn],
        [0.0] * len(tokens),
        [-1, -1, *[4] * drawn],
    )
    return AnswerLine(text, [sequence], components or {})


def group(*answers: AnswerLine, rewards: tuple[float, ...] = (1.0, 0.0), ordinal: int = 7, **more: object) -> GroupLine:
    count = len(rewards)
    made = GroupLine(5, ordinal, f"d{ordinal}", "1+", [*rewards], [0.0] * count, [2] * count, ["stop"] * count, 4, 4)
    return made._replace(answers=[*answers], begun_version=4, **more)


def test_answers_are_compared_with_those_of_the_same_sample() -> None:
    recorded = group(answer("ab"), answer("ab"), samples=[0, 2])
    again = group(answer("ab", -1.5), answer("x"), answer("ac"), rewards=(1.0, 0.0, 0.25))
    equal, other = Replayed(recorded, 4, again, (), ()).pairs()
    assert (equal.sample, equal.differs_at, equal.largest_difference) == (0, None, 0.5)
    assert (other.sample, other.differs_at, other.reward) == (2, (0, 3), 0.25)


def test_an_answer_that_ends_earlier_differs_where_it_ends() -> None:
    (pair,) = Replayed(group(answer("ab"), rewards=(1.0,)), 4, group(answer("abc"), rewards=(0.0,)), (), ()).pairs()
    assert pair.differs_at == (0, 4)


def test_a_lost_answer_has_no_pair() -> None:
    recorded = group(answer("ab"), answer("b"))
    again = group(answer("b"), rewards=(0.0,), samples=[1])
    lost, there = Replayed(recorded, 4, again, (), ()).pairs()
    assert lost.again is None and there.differs_at is None
    assert "answer 0: lost this time" in "\n".join(replay_lines(Replayed(recorded, 4, again, (), ()), None))


def test_changed_scores_are_named_by_component() -> None:
    recorded = group(answer("ab", components={"right": 1.0, "short": 0.0}), answer("b"))
    now = {"reward": 1.5, "components": {"right": 1.0, "format": 0.5}}
    assert changed_scores(recorded, 0, now) == {"reward": (1.0, 1.5), "short": (0.0, None), "format": (None, 0.5)}
    assert changed_scores(recorded, 1, {"reward": 0.0, "components": {}}) == {}
    assert changed_scores(recorded, 1, {"lost": "no judge"}) == {"reward": (0.0, None)}


def test_tokens_are_shown_around_the_first_that_differs() -> None:
    recorded, again = group(answer("abcdefgh"), rewards=(1.0,)), group(answer("abcdefXYZ", -2.0), rewards=(0.0,))
    lines = [*replay_lines(Replayed(recorded, 4, again, (), ()), None)]
    table = [line.split() for line in lines if line.startswith("      ")]
    assert table[0] == ["token", "recorded", "log-prob", "again", "log-prob"]
    assert table[1] == ["2", "'c'", "-1.0000", "'c'", "-2.0000"]
    assert table[5:] == [
        ["6", "'g'", "-1.0000", "'X'", "-2.0000", "differs"],
        ["7", "'h'", "-1.0000", "'Y'", "-2.0000", "differs"],
        ["8", "'Z'", "-2.0000", "differs"],
    ]
    assert "differs from token 6 of its answer on; reward 1; the new answer earns 0" in lines[2]
    whole = [*replay_lines(Replayed(recorded, 4, again, (), ()), 0)]
    assert sum(line.startswith("      ") for line in whole) == 10


def conversation(*texts: str) -> AnswerLine:
    """Turns of the model, with a token of its partner between two of them."""
    drawn = "?".join(texts)
    one = answer(drawn).sequences[0]
    turns, first = [], 2
    for text in texts:
        turns.append([first, first + len(text)])
        first += len(text) + 1
    return AnswerLine(drawn, [one._replace(turns=turns)])


def test_the_turn_that_differs_is_named() -> None:
    def line(old: AnswerLine, new: AnswerLine) -> str:
        found = Replayed(group(old, rewards=(1.0,)), 4, group(new, rewards=(0.0,)), (), ())
        return [*replay_lines(found, None)][2]

    old = conversation("ab", "cd")
    assert "differs from token 1 of turn 2 on" in line(old, conversation("ab", "cx"))
    one = old.sequences[0]
    other_tool = one._replace(tokens=[*one.tokens[:4], ord("!"), *one.tokens[5:]])
    assert "differs from the text before turn 2 on" in line(old, AnswerLine("", [other_tool]))
    branches = AnswerLine("", [one, one])
    assert "differs from token 2 of turn 2 on" in line(old, branches)
    assert "differs from token 2 of turn 2 on" in line(branches, old)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of nine steps with checkpoints after steps 6 and 8, whose step 5 has one prompt with tokens."""
    run = make_run(tmp_path / "run")
    for step in range(1, 10):
        append(run.metrics, MetricsLine(step, {}))
    for step in (6, 8):
        run.checkpoint(step).mkdir(parents=True)
    folder = run.attempt(1)
    folder.rollouts.mkdir(parents=True)
    lines = [group(answer("ab"), answer("b")), group(ordinal=8), group(ordinal=9)._replace(step=4)]
    Path(rollouts_file(folder, 0, 5)).write_bytes(member("".join(group_json(line) + "\n" for line in lines)))
    return run


@pytest.mark.parametrize(
    ("step", "prompt", "checkpoint", "why"),
    [
        (5, "7", None, "no checkpoint of policy version 4, which sampled this, is kept; the nearest is that of step 6"),
        (5, "d7", 9, "no checkpoint of step 9 is kept; the nearest is that of step 8: --checkpoint 8"),
        (5, "8", None, r"prompt 8 of step 5 was recorded without tokens; with tokens: 7 \(d7\)"),
        (5, "d", None, r"d means 2 prompts of step 5; with tokens: 7 \(d7\)"),
        (5, "99", None, r"99 means no prompt of step 5; with tokens: 7 \(d7\)"),
        (4, "9", None, "step 4 was recorded without tokens; the nearest with tokens: 5"),
        (12, "9", None, "has no step 12 yet: its newest is 9"),
    ],
)
def test_what_cannot_be_repeated_is_refused_with_what_can(
    run: RunDir, step: int, prompt: str, checkpoint: int | None, why: str
) -> None:
    with pytest.raises(BadInput, match=why) as refused:
        replay(run, step, prompt, checkpoint=checkpoint)
    assert refused.value.exit_code == 2


def test_a_record_of_an_older_mrl_can_only_be_scored(run: RunDir) -> None:
    line = group(answer("ab"), answer("b"))._replace(begun_version=-1)
    Path(rollouts_file(run.attempt(1), 0, 5)).write_bytes(member(group_json(line) + "\n"))
    with pytest.raises(BadInput, match="--no-sample only scores the recorded answers"):
        replay(run, 5, "7", checkpoint=6)
