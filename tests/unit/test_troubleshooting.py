"""docs/troubleshooting.md quotes messages as the code writes them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
COMMAND = re.compile(r"(error: FILE|ls|mrl|mrl-submit|pip|python|sacct|scontrol|tensorboard)\b")
CHANGES = re.compile(
    r"\.\.\.|of the last 10 steps|[\d.,%()]+|NAME|JOB|rewards\.py|TypeError|it was killed by SIGKILL|(?= reached)|\w+: "
)
"""Parts of a quoted message that differ from one run to the next, or that the code puts together."""


@pytest.fixture(scope="module")
def texts() -> str:
    """All strings of the code."""
    found = []
    for top in ("launcher", "megatron_rl"):
        for file in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


QUOTES = [quote for quote in re.findall(r"`([^`]+)`", PAGE.read_text(encoding="utf-8")) if " " in quote]


@pytest.mark.parametrize("quote", [" ".join(quote.split()) for quote in QUOTES if not COMMAND.match(quote)])
def test_a_quoted_message_is_in_the_code(quote: str, texts: str) -> None:
    parts = (part.strip(" :,;.") for part in CHANGES.split(quote))
    assert [part for part in parts if len(part) > 3 and part not in texts] == []
