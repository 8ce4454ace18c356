"""mrl rollouts: groups of a run's record, chosen by their answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli.rollouts import command
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.files import append_bytes
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, write
from megatron_rl.contract.rollout_records import (
    AnswerLine,
    GroupLine,
    SequenceLine,
    TurnLine,
    group_json,
    member,
    rollouts_file,
)
from megatron_rl.contract.run_records import Fork

HOSTILE = "\x1b]0;owned\x07<script>\u202egnp.exe\nsecond line"
SEQUENCE = SequenceLine([1, 7], ["2", "\x1b["], [[1, 2]], [False, True], [0.0, -0.5], [0.0, -1e9], [-1, 3])


def group(
    step: int, ordinal: int, rewards: list[float], prompt: str = "2+3=", texts: tuple[str, ...] = ()
) -> GroupLine:
    return GroupLine(
        step=step,
        ordinal=ordinal,
        problem=f"{ord(prompt[0]):012x}",
        prompt=prompt,
        rewards=rewards,
        advantages=[reward - 0.5 for reward in rewards],
        lengths=[place + 1 for place in range(len(rewards))],
        finish_reasons=["stop", "length"][: len(rewards)],
        lowest_version=0,
        highest_version=0,
        answers=[AnswerLine(text, [SEQUENCE], {"format": 1.0}) for text in texts],
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Step 1 has a sampled group, step 2 has none, step 3 was trained by an attempt that has not published it."""
    found = RunDir(tmp_path / "mine")
    found.root.mkdir()
    found.resolved.touch()
    for step in (1, 2):
        append(found.metrics, MetricsLine(step, {}))
    groups = [
        group(1, 0, [1.0, 0.0], texts=("5", HOSTILE)),
        group(1, 1, [0.0, 0.0], prompt="9-9="),
        group(2, 2, [0.5, 1.0]),
        group(2, 3, [0.0], prompt="9-9=")._replace(failures={"timeout \x07": 1}, passed_over="no signal"),
        group(3, 4, [1.0]),
    ]
    for line in groups:
        path = Path(rollouts_file(found.attempt(1), 0, line.step))
        path.parent.mkdir(parents=True, exist_ok=True)
        append_bytes(path, member(group_json(line) + "\n"))
    return found


def test_turns_are_shown_in_the_order_of_time_with_their_credit(run: RunDir):
    turns = [[TurnLine(1.0, 0.75, "a\x1b[", "solver", 1), TurnLine(0.0, -0.5, number=0)]]
    line = group(2, 9, [1.0])._replace(turns=turns)
    append_bytes(Path(rollouts_file(run.attempt(1), 0, 2)), member(group_json(line) + "\n"))
    said = printed(run, "--step", "2")
    first, second = [each for each in said.splitlines() if each.startswith("    turn ")]
    assert first == "    turn 1  reward 0  advantage -0.5"
    assert second == "    turn 2  reward 1  advantage +0.75  agent solver  key a\\x1b["


def printed(run: RunDir, *options: str, code: int = 0) -> str:
    result = CliRunner().invoke(command, [str(run.root), *options], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def ordinals(run: RunDir, *options: str) -> list[int]:
    return [json.loads(line)["ordinal"] for line in printed(run, "--json", "-n", "0", *options).splitlines()]


def test_the_newest_sampled_groups_are_shown(run: RunDir):
    text = printed(run)
    assert "step 1  prompt 0  problem 000000000032  signal\n  prompt\n    2+3=\n" in text
    assert "  reward 1  advantage +0.5  1 tokens  stop  format 1\n    5\n" in text
    assert "prompt 1" not in text


def test_text_of_the_model_cannot_control_the_terminal(run: RunDir):
    text = printed(run) + printed(run, "--step", "2")
    assert "\\x1b]0;owned\\x07<script>\\u202egnp.exe\n    second line" in text
    assert "lost: 1 x timeout \\x07" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--step", "1"], [0, 1]),
        (["--step", "1:"], [0, 1, 2, 3]),
        (["--step", "1:", "--no-signal"], [1, 3]),
        (["--step", "1:", "--signal"], [0, 2]),
        (["--step", "1:", "--reward", "0.4:0.9"], [2]),
        (["--step", "1:", "--reward", "0"], [0, 1, 3]),
        (["--step", "1:", "--reason", "length"], [0, 1, 2]),
        (["--step", "1:", "--problem", "000000000039"], [1, 3]),
    ],
)
def test_conditions_choose_groups(run: RunDir, options: list[str], expected: list[int]):
    assert ordinals(run, *options) == expected


def test_only_the_answers_that_fit_are_shown(run: RunDir):
    text = printed(run, "--reward", "1")
    assert "reward 1" in text and "reward 0" not in text
    assert json.loads(printed(run, "--reward", "1", "--json"))["selected"] == [0]


def test_a_limit_says_that_more_fit(run: RunDir):
    assert "more fit" in printed(run, "--step", "1:", "-n", "2")
    assert "more fit" not in printed(run, "--step", "1:", "-n", "4")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--step", "3"], 1, "has no step 3 yet: its newest is 2"),
        (["--reason", "nowhere"], 1, "no recorded group fits"),
        (["--step", "two"], 2, "'two' is neither a whole number nor two with a colon between them"),
        (["--reward", "1:0"], 2, "the first number is larger"),
        (["--step", ":"], 2, "neither a whole number"),
    ],
)
def test_what_cannot_be_shown_is_said(run: RunDir, options: list[str], code: int, message: str):
    assert message in printed(run, *options, code=code)


def test_steps_before_a_fork_are_those_of_its_origin_or_named(run: RunDir, tmp_path: Path):
    fork = RunDir(tmp_path / "fork")
    fork.root.mkdir()
    fork.resolved.touch()
    append(fork.metrics, MetricsLine(1, {}))
    write(fork.fork, Fork(str(run.root), 1, {}, at=1.0))
    assert ordinals(fork, "--step", "1") == [0, 1]
    shutil.rmtree(run.root)
    said = printed(fork, "--step", "1", code=1)
    assert f"Steps up to 1 are recorded in {run.root}, from which the run was forked" in said


def test_a_run_without_a_step_has_nothing_to_show(run: RunDir):
    run.metrics.unlink()
    assert "has not finished a step yet" in printed(run, code=1)
