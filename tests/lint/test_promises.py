"""Each promise of docs/promises.md names a test, a target of make or a command, and all of them exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from launcher.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| (?!promise |-)", line)]


def problem_of(name: str) -> str | None:
    """Why a name in backticks shows nothing; None for one that exists."""
    program, _, rest = name.partition(" ")
    if program == "make":
        return None if re.search(rf"^{rest}:", (ROOT / "Makefile").read_text(), re.MULTILINE) else "no such target"
    if program == "mrl":
        return None if rest.split()[0] in COMMANDS else "no such command"
    path, _, test = name.partition("::")
    file = ROOT / path
    if not file.is_file():
        return "no such file"
    functions = {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
    if test and test not in functions:
        return "no such test"
    return None if any(one.startswith("test_") for one in functions) else "no tests in it"


def test_each_promise_names_what_shows_it() -> None:
    assert len(ROWS) > 20
    assert [row for row in ROWS if len(row) != 2 or not re.search("`[^`]+`", row[1])] == []


def test_what_shows_a_promise_exists() -> None:
    named = [name for _, shown_by in ROWS for name in re.findall("`([^`]+)`", shown_by)]
    assert [f"{name}: {problem}" for name in named if (problem := problem_of(name))] == []
