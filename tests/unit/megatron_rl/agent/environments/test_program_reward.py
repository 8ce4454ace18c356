"""Reward of a program: the last line that it prints, or what its function returns."""

from __future__ import annotations

import pytest

from megatron_rl.agent.environments.program.nursery_wire import ProgramEnd
from megatron_rl.agent.environments.program.program_environment import why_lost
from megatron_rl.agent.environments.program.reward_line import NoReward, reward_in, reward_of


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("1.0", 1.0),
        ("the model says 3\n-2\n\n  \n", -2.0),
        ('{"reward": 0.5}', {"reward": 0.5}),
        ('log\n{"reward": 1, "turns": 3, "solved": true, "note": "fine"}\n', {"reward": 1, "turns": 3, "solved": 1}),
        ("0.1\n0.2", 0.2),
        ('{"reward": 1}\n{"reward": 1.0}', {"reward": 1.0}),
    ],
)
def test_the_last_line_is_the_reward_and_its_further_numbers_are_metrics(output: str, reward: object) -> None:
    assert reward_in(output) == reward


def test_any_other_ending_is_no_reward_and_says_why() -> None:
    for output, reason in [
        ("", "it printed nothing"),
        ("\n \n", "it printed nothing"),
        ("1.0\ndone", "its last line must be"),
        ("reward: 1.0", "its last line must be"),
        ("1.0 0.5", "its last line must be"),
        ('{"reward": 1}{"reward": 0}', "its last line must be"),
        ('{"reward": 1}\n{"reward": 0}', "its last two lines report different ones"),
        ('{"score": 1}', "its last line must be"),
        ('{"reward": "1"}', "its last line must be"),
        ('{"reward": null}', "its last line must be"),
        ("[1.0]", "its last line must be"),
        ("NaN", "return a number of magnitude"),
        ('{"reward": Infinity}', "return a number of magnitude"),
        ('{"reward": 1, "tokens per s": 2}', "letters, digits"),
        ("1" * 400, "too large"),
        ("[" * 100_000, "its last line must be"),
    ]:
        with pytest.raises(NoReward, match="reward") as raised:
            reward_in(output)
        assert reason in str(raised.value), (output, reason)
        assert len(str(raised.value)) < 250, (output, reason)


def test_a_function_returns_a_number_or_a_mapping_with_a_reward() -> None:
    assert reward_of(1) == 1.0
    assert reward_of({"reward": 0.5, "calls": 2}) == {"reward": 0.5, "calls": 2.0}
    for value in (None, "1.0", [1.0], {}, {"score": 1.0}, float("nan")):
        with pytest.raises(NoReward, match="no reward"):
            reward_of(value)


def test_a_lost_run_says_how_its_program_ended() -> None:
    assert why_lost(ProgramEnd(0, ending="1.0"), 5) == ""
    assert why_lost(ProgramEnd(1, output="Traceback ...\nKeyError: 'x'\n\n"), 5) == "program: exit code 1: KeyError"
    assert why_lost(ProgramEnd(-11), 5) == "program: SIGSEGV"
    assert why_lost(ProgramEnd(-15, over_limit=True), 5) == "program: not done within 5 s (environment.args.timeout_s)"
    assert why_lost(ProgramEnd(1, unstarted="agent: no such file"), 5) == (
        "program: it could not be started: agent: no such file"
    )
    assert why_lost(ProgramEnd(1, raised="ValueError (agent.py:3)"), 5) == "program: ValueError (agent.py:3)"
    assert why_lost(ProgramEnd(1, output="x" * 1000), 5) == "program: exit code 1"


@pytest.mark.parametrize(
    ("code", "output", "reason"),
    [
        (127, "/tmp/x7/ask.sh: 3: curl: not found\n", "exit code 127: curl: not found"),
        (127, "hello\n./ask.sh: line 3: curl: command not found\n", "exit code 127: curl: command not found"),
        (127, "bash: curl: command not found\n", "exit code 127: curl: command not found"),
        (127, "env: 'node': No such file or directory\n", "exit code 127: env: 'node': No such file or directory"),
        (127, "sh: 1: jq: not found\ngiving up\n", "exit code 127: jq: not found"),
        (126, "sh: 1: ./tool: Permission denied\n", "exit code 126: ./tool: Permission denied"),
        (127, "", "exit code 127"),
    ],
)
def test_a_lost_run_names_the_command_that_its_shell_could_not_run(code: int, output: str, reason: str) -> None:
    assert why_lost(ProgramEnd(code, output=output), 5) == f"program: {reason}"
