"""mrl rows: output for people and programs, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli.main import main
from launcher.cli.rows import is_faulty
from launcher.cli.show.row_lines import count_lines, row_lines

SPANS = [{"learned": False, "tokens": 2, "text": "a\x1b[2J\nb"}, {"learned": True, "tokens": 1, "text": "c"}]


def test_learned_tokens_stand_in_brackets_and_controls_of_the_data_do_not_reach_the_terminal() -> None:
    found = {"row": 1, "set": "", "where": "a.jsonl:1", "tokens": 3, "learned": 1, "spans": SPANS}
    head, *text = row_lines(found)
    assert head == "a.jsonl:1: 3 tokens, 1 learned"
    assert next(row_lines({**found, "set": "sums"})) == "sums: a.jsonl:1: 3 tokens, 1 learned"
    assert "\n".join(text) == "  a\\x1b[2J\n  b\x1b[32m[[c]]\x1b[0m\n"


@pytest.mark.parametrize("text", ["\u202eabc", "\u2028", "\x9b31m", "\ud800", "\r"])
def test_characters_that_would_mislead_a_terminal_are_escaped(text: str) -> None:
    shown = "\n".join(row_lines({"row": 1, "set": "", "where": text, "dropped": text, "text": text}))
    assert text[0] not in shown and shown.encode()


def test_counts_are_said_in_four_lines() -> None:
    lengths = {"50": 6, "90": 7, "99": 7, "100": 40}
    found = {"set": "x", "rows": 5, "dropped": {"why": 2}, "lengths": lengths, "limit": 32, "equal": 1}
    assert [*count_lines({**found, "equal_prompts": 2, "learned": 0.25})] == [
        "x: 5 rows, 2 of them dropped",
        "          2  why",
        "  tokens: 50 % up to 6, 90 % up to 7, 99 % up to 7, the longest 40; at most 32 fit",
        "  equal to an earlier one: 1 rows, 2 prompts",
        "  learned: 25.0% of the tokens",
    ]


def test_columns_that_nothing_reads_are_named_before_the_rows_and_among_the_counts() -> None:
    found = {"set": "sums", "ignored": ["id", "note\x1b"]}
    assert next(row_lines(found)) == "sums: nothing reads the columns id, note\\x1b"
    assert not is_faulty(found)
    counted = {**found, "rows": 5, "dropped": {}, "lengths": {}, "equal": 0, "equal_prompts": 0}
    assert [*count_lines(counted)][2:] == ["  nothing reads the columns id, note\\x1b"]


SCORED = {"problem": 1, "tokens": 4, "room": 9}
LOST = {
    "failures": ["a.py:3: KeyError"],
    "traces": {"a.py:3: KeyError": "Traceback\n\x1b]0;a"},
    "output": "1\n2\x1b[2J\n",
}


def test_what_a_reward_printed_and_where_it_failed_is_shown_below_its_problem() -> None:
    found = {**SCORED, "set": "python", "prompt": "1+1", "no_gold": "unknown", "wrong": "\t", "wrong_reward": None}
    assert [*row_lines({**found, **LOST})] == [
        "problem 1 of python: 4 tokens",
        "  1+1",
        "  right answer: unknown: unknown",
        '  wrong answer "\\t": lost',
        "  lost: a.py:3: KeyError",
        "    Traceback",
        "    \\x1b]0;a",
        "  output",
        "    1",
        "    2\\x1b[2J",
        "",
    ]


@pytest.mark.parametrize(
    ("found", "faulty"),
    [
        ({"row": 1, "spans": SPANS}, False),
        ({"row": 1, "dropped": "too long"}, True),
        ({"rows": 5, "dropped": {"too long": 1}}, False),
        ({**SCORED, "gold_reward": 1.0, "wrong_reward": 0.0}, False),
        ({**SCORED, "gold_reward": 1.0, "wrong_reward": 1.0}, True),
        ({**SCORED, "gold_reward": None, "wrong_reward": 0.0}, True),
        ({**SCORED, "gold_reward": None, "no_gold": "unknown", "wrong_reward": 0.0}, False),
        ({**SCORED, "tokens": 10, "gold_reward": 1.0, "wrong_reward": 0.0}, True),
    ],
)
def test_dropped_row_or_a_reward_that_teaches_nothing_is_exit_code_1(found: dict[str, object], faulty: bool) -> None:
    assert is_faulty(found) is faulty


@pytest.mark.usefixtures("no_clusters_of_the_user")
def test_rows_of_a_recipe_come_from_the_code_of_its_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["rows", "demo-supervised", "-n", "2", "--json"])
    first, second = json.loads(done.stdout)["rows"]
    assert done.exit_code == 0 and second["row"] == 2
    assert [span["learned"] for span in first["spans"]] == [False, True]
    assert first["spans"][1]["text"].endswith("<end>")


@pytest.mark.usefixtures("no_clusters_of_the_user")
def test_counts_of_a_recipe_name_what_a_run_would_warn_of(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward(response, **columns):\n    return 0.0\n")
    rows = [json.dumps({"prompt": "1+1=", "answer": str(n)}) for n in range(3)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    arguments = f"{{file: {tmp_path}/reward.py, train: {tmp_path}/data.jsonl}}"
    done = CliRunner().invoke(main, ["rows", "demo", f"environment={{name: python, args: {arguments}}}", "--all"])
    assert "(answer): 2; questions that remain: 1" in done.stdout
